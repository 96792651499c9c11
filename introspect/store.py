"""Traces kept between runs, in the user's cache directory.

An entry is found by a digest of everything its record follows from: the model's files, the whole run shape, the
versions of torch and transformers, and this package's own code. That last part is the size and time of each file and
not the package version: while hooks/ is being edited the version stays the same, and a record made by the code of an
hour ago would look like the answer of the code of now.

Entries are written beside their place and then moved there, so that two processes may use the store at once and a
killed one leaves nothing half written. What cannot be read back whole is removed and made anew. A store that cannot be
written costs time, never an answer: the user is told once.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import astuple
from functools import cache
from hashlib import sha256
from pathlib import Path

from introspect.atomic import write_atomically
from introspect.errors import FileAccessError, TraceFormatError
from introspect.records import RunShape, Trace
from introspect.serialize import trace_from_json, trace_to_json

MOST_BYTES = 512 * 10**6
"""The store's size; beyond it the entries not used for longest go."""


def cache_directory() -> Path:
    """$INTROSPECT_CACHE, else introspect/ in $XDG_CACHE_HOME or ~/.cache."""
    if named := os.environ.get("INTROSPECT_CACHE"):
        return Path(os.path.expanduser(named))
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "introspect"
    home = os.path.expanduser("~")  # unchanged for a user without a home, as many a container's
    return Path("/" if home == "~" else home) / ".cache" / "introspect"


def entry_path(model_digest: str, model_id: str, run: RunShape) -> Path:
    """Where the record of this run of this model is kept, whether it is there or not."""
    facts = (model_digest, model_id, *astuple(run), *versions().items(), _code_digest())
    return cache_directory() / "traces" / f"{sha256(repr(facts).encode()).hexdigest()}.json"


def load(path: Path) -> Trace | None:
    """The record kept at `path`; None when there is none. A damaged entry is removed and counts as none."""
    try:
        trace = trace_from_json(path.read_text(encoding="utf-8"), str(path))
    except OSError:
        return None
    except (TraceFormatError, UnicodeDecodeError):
        with suppress(OSError):
            path.unlink()
        return None
    with suppress(OSError):
        os.utime(path)  # pruning keeps what is used
    return trace


def save(path: Path, trace: Trace) -> None:
    """Keep a record at `path` and keep the store within its size. FileAccessError when the system refuses."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileAccessError(str(path.parent), "write", error.strerror or str(error)) from None
    write_atomically(path, trace_to_json(trace) + "\n")
    _prune(path.parent)


def _prune(folder: Path) -> None:
    """Remove the entries used longest ago until the rest fits. Another process may be doing the same."""
    with suppress(OSError):
        entries = [(entry.stat().st_mtime, entry.stat().st_size, entry.path) for entry in os.scandir(folder)]
        excess = sum(size for _, size, _ in entries) - MOST_BYTES
        for _, size, path in sorted(entries):
            if excess <= 0:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            excess -= size


@cache
def versions() -> dict[str, str]:
    """Versions of torch and transformers by the names of their installed metadata folders ("" where there is none).

    importlib.metadata would say the same and take 40 ms, a third of the time of an answer from the store.
    """
    found = {"torch": "", "transformers": ""}
    for folder in filter(os.path.isdir, reversed(sys.path)):
        for name in os.listdir(folder):
            package, _, version = name.removesuffix(".dist-info").partition("-")
            if name.endswith(".dist-info") and package in found:
                found[package] = version
    return found


@cache
def _code_digest() -> str:
    here = Path(__file__).parent
    files = sorted([*(here / "hooks").glob("*.py"), *here.glob("*.py")])
    return sha256(repr([(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]).encode()).hexdigest()
