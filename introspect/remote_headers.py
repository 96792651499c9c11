"""The headers of a checkpoint on the Hub, by HTTP range requests: of each file its first bytes and nothing else.

What the server does not send in one piece is asked for from where it stopped. A server without ranges is read from the
start and left once the header is there. Every wait and the number of attempts are bounded, whatever the server asks.
The session, token, proxies and redirects are huggingface_hub's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any

from introspect import hub
from introspect.checkpoint import (
    ADAPTER,
    ADAPTER_CONFIG,
    MAX_INDEX_BYTES,
    Checkpoint,
    Index,
    Say,
    Unread,
    as_unread,
    choose_files,
    is_inside,
    parse_index,
    sort_out,
)
from introspect.errors import CheckpointError, HeaderError
from introspect.safetensors_header import Header, parse_file

FIRST_BYTES = 128 * 1024  # holds 97 % of all headers, as huggingface_hub measured
PARALLEL = 8
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a server is waited for. `timeout`: seconds for the next packet; `deadline`: seconds for one answer."""

    attempts: int = 5
    timeout: float = 10.0
    deadline: float = 60.0
    longest_pause: float = hub.LONGEST_PAUSE
    pause: Callable[[float], None] = sleep


def read_hub(model: str, revision: str | None, say: Say, patience: Patience | None = None) -> Checkpoint:
    """The checkpoint of a Hub repository. Raises what hub.list_files raises, and CheckpointError if it has none."""
    patience = patience or Patience()
    commit, names = hub.list_files(model, revision)
    files, index_name = choose_files(model, [name for name in names if is_inside(name) and "/" not in name])
    index = _fetch_index(model, commit, index_name, patience) if index_name else None
    if index is not None:
        files = index.files
    found: list[Header | Unread] = []
    pool = ThreadPoolExecutor(min(PARALLEL, len(files) or 1))
    try:
        for one in pool.map(lambda file: _fetch_header(model, commit, file, patience), files):
            found.append(one)
            say(f"fetching headers of {model}: {len(found)} of {len(files)}")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C does not wait for what was not yet asked
    headers, unread = sort_out(found)
    weights = {name for name in names if name.endswith(".safetensors") and "/" not in name}
    return Checkpoint(
        source=f"Hugging Face Hub {model} (commit {commit[:12]})",
        kind="hub",
        headers=headers,
        unread=unread,
        index=index,
        strays=tuple(sorted(weights - set(files))),
        adapter_config=_fetch_json(model, commit, ADAPTER_CONFIG, patience) if files == (ADAPTER,) else None,
    )


def _fetch_header(model: str, commit: str, file: str, patience: Patience) -> Header | Unread:
    remote = RemoteFile(hub.file_url(model, file, commit), file, patience)
    try:
        remote.span(0, FIRST_BYTES)
        return parse_file(remote.span, file, remote.total)
    except HeaderError as error:
        return as_unread(error)


def _fetch_index(model: str, commit: str, file: str, patience: Patience) -> Index:
    return parse_index(_fetch_whole(model, commit, file, patience), f"{model}/{file}", file)


def _fetch_json(model: str, commit: str, file: str, patience: Patience) -> dict[str, Any]:
    try:
        value = json.loads(_fetch_whole(model, commit, file, patience))
    except ValueError as error:
        raise CheckpointError(f"{model}/{file}", f"not JSON: {error}", "ask the repository's owner") from None
    return value if isinstance(value, dict) else {}


def _fetch_whole(model: str, commit: str, file: str, patience: Patience) -> bytes:
    remote = RemoteFile(hub.file_url(model, file, commit), file, patience)
    try:
        return remote.span(0, MAX_INDEX_BYTES + 1)
    except HeaderError as error:
        remedy = f"{error.expected} was expected; try again, or give a downloaded folder"
        raise CheckpointError(f"{model}/{file}", error.found, remedy) from None


@dataclass(slots=True)
class RemoteFile:
    """The first bytes of a file behind a URL, fetched as far as they are asked for. `total`: its size once known."""

    url: str
    file: str
    patience: Patience
    total: int | None = None
    _have: bytearray = field(default_factory=bytearray)
    _failures: int = 0

    def span(self, begin: int, end: int) -> bytes:
        """Bytes `begin` to `end` of the file, fewer when it ends before. HeaderError when the server does not send."""
        while len(self._have) < end and (self.total is None or len(self._have) < self.total):
            before = len(self._have)
            problem, pause = self._request(end)
            if len(self._have) > before and problem is None:
                continue
            if problem is None and self.total == len(self._have):
                break
            self._failures += 1
            if self._failures >= self.patience.attempts or pause > self.patience.longest_pause:
                raise self._failed(problem or "an empty answer")
            self.patience.pause(pause)
        return bytes(self._have[begin:end])

    def _failed(self, problem: str, expected: str = "the first bytes of the file") -> HeaderError:
        tried = f" (attempt {self._failures} of {self.patience.attempts})" if self._failures else ""
        return HeaderError(self.file, "not_served", problem + tried, expected)

    def _request(self, end: int) -> tuple[str | None, float]:
        """Ask for what is missing up to `end`; (what went wrong or None, seconds to wait before asking again)."""
        from huggingface_hub.utils import build_hf_headers, get_session

        headers = build_hf_headers() | {"Range": f"bytes={len(self._have)}-{end - 1}", "Accept-Encoding": "identity"}
        pause = float(2**self._failures) / 2
        stopped: list[str] = []
        with (
            _named_failures(stopped),
            get_session().stream("GET", self.url, headers=headers, timeout=self.patience.timeout) as response,
        ):
            if response.status_code in hub.RETRIED_STATUS:
                wanted = response.headers.get("Retry-After", "")
                problem = f"the server answered {response.status_code} {response.reason_phrase}"
                return problem, float(wanted) if wanted.isdigit() else pause
            self._take(response, end)
        return (stopped[0] if stopped else None), pause

    def _take(self, response: Any, end: int) -> None:
        skip = self._start(response)
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise self._failed("a compressed answer, whose bytes are not the file's")
        deadline = monotonic() + self.patience.deadline
        for chunk in response.iter_raw():
            if skip:
                chunk, skip = chunk[skip:], max(0, skip - len(chunk))
            self._have += chunk[: end - len(self._have)]
            if len(self._have) >= end:
                return
            if monotonic() > deadline:
                raise self._failed(f"only {len(self._have):,} bytes in {self.patience.deadline:g} s")
        if response.status_code == 200:
            self.total = len(self._have) if self.total is None else self.total

    def _start(self, response: Any) -> int:
        """Judge the status line; the number of bytes to skip, because the server starts at the beginning again."""
        status = response.status_code
        if status == 206:
            match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if match is None or match[1] is None or int(match[1]) != len(self._have):
                raise self._failed(f"another range than asked for ({response.headers.get('Content-Range')!r})")
            self.total = int(match[2]) if match[2] != "*" else self.total
            return 0
        if status == 200:
            length = response.headers.get("Content-Length", "")
            self.total = int(length) if length.isdigit() else self.total
            return len(self._have)
        if status == 416:
            self.total = len(self._have)
            return 0
        words = {401: "a token", 403: "a token with access to this repository", 404: "the file"}
        raise self._failed(f"the server answered {status} {response.reason_phrase}", words.get(status, "the file"))


@contextmanager
def _named_failures(stopped: list[str]) -> Iterator[None]:
    """Collect what the HTTP library of huggingface_hub raises: its name differs between versions."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in {"httpx", "httpx2", "httpcore", "httpcore2"}:
            raise
        stopped.append(f"no whole answer ({type(error).__name__}: {error})")
