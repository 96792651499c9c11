"""A checkpoint on this machine: which files belong to it, what their headers say, what its index says.

A folder is read the way transformers looks for weights: model.safetensors, else the shards its index names, else an
adapter, else whatever safetensors files there are. No file outside the folder is opened, whatever an index or a link
says; only the blobs of a Hub cache, where its snapshots keep their content, may lie beside it. No pickle is opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from introspect.check_kinds import KINDS
from introspect.errors import CheckpointError, HeaderError
from introspect.safetensors_header import Fault, Header, read_header
from introspect.strict_json import JsonProblem, parse_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
INDEX_SUFFIX = ".safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5")
FORMS = "a .safetensors file, a folder, an index.json or a Hub id"
SHARD_NAME = re.compile(r"(?P<stem>.+)[-_](?P<number>\d{1,6})[-_]of[-_](?P<count>\d{1,6})\.safetensors")
MAX_INDEX_BYTES = 128 * 2**20  # 280,000 names take 30 MB
MAX_ENTRIES = 100_000
MAX_SHARDS = 10_000
MAX_ALL_TENSORS = 1_000_000  # the largest models have 280,000

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What model.safetensors.index.json says. `weight_map`: tensor name -> file; `total_size` in bytes."""

    file: str
    weight_map: dict[str, str]
    total_size: int | None
    metadata: dict[str, Any]
    faults: tuple[Fault, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """The files it names, sorted."""
        return tuple(sorted(set(self.weight_map.values())))


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """A file of the checkpoint whose header could not be had: the data of a HeaderError."""

    file: str
    kind: str
    found: str
    expected: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """All that is known of a checkpoint without its weights.

    `kind` "index" has no headers: only names and a total. `folder` is None for a Hub checkpoint. `strays` are weight
    files that were found and do not belong to it.
    """

    source: str
    kind: Literal["file", "folder", "index", "hub"]
    headers: tuple[Header, ...] = ()
    unread: tuple[Unread, ...] = ()
    index: Index | None = None
    strays: tuple[str, ...] = ()
    folder: Path | None = None
    adapter_config: dict[str, Any] | None = None


def read_local(path: Path, say: Say = lambda text: None) -> Checkpoint:
    """The checkpoint at a path of any of the FORMS but the last. `say` is told of progress.

    Raises CheckpointError when there is none; a shard that cannot be read is an `Unread` instead.
    """
    refuse_pickle(path.name)
    if path.is_dir():
        return _read_folder(path, say)
    if path.name.endswith(".json"):
        index = read_index(path, path.name)
        return Checkpoint(source=f"index {path}", kind="index", index=index, folder=path.parent)
    if path.suffix != ".safetensors" and path.suffix:
        raise CheckpointError(str(path), f"a {path.suffix} file", f"give {FORMS}")
    headers, unread = read_headers(path.parent, [path.name], say, follow=True)
    return Checkpoint(
        source=f"file {path}",
        kind="file",
        headers=headers,
        unread=unread,
        folder=path.parent,
        adapter_config=_adapter_config(path.parent) if path.name == ADAPTER else None,
    )


def refuse_pickle(name: str) -> None:
    """Raise CheckpointError for a file whose name says pickle (or another format that is not read)."""
    if name.endswith(PICKLES):
        found = (
            f"a {PurePosixPath(name).suffix} file: it can hold a pickle, whose loading runs code, and is never opened"
        )
        raise CheckpointError(name, found, "convert it to safetensors (safetensors.torch.save_file) where you trust it")


def _read_folder(folder: Path, say: Say) -> Checkpoint:
    names = _list(folder)
    weights = [name for name in names if name.endswith(".safetensors")]
    files, index_name = choose_files(str(folder), names)
    index = _read_index_of(folder, index_name) if index_name else None
    if index is not None:
        files = index.files
    headers, unread = read_headers(folder, files, say)
    return Checkpoint(
        source=f"folder {folder}",
        kind="folder",
        headers=headers,
        unread=unread,
        index=index,
        strays=tuple(sorted(set(weights) - set(files))),
        folder=folder,
        adapter_config=_adapter_config(folder) if files == (ADAPTER,) else None,
    )


def choose_files(place: str, names: Iterable[str]) -> tuple[tuple[str, ...], str | None]:
    """(weight files, index) that make up the checkpoint among the file `names` of a folder or repository.

    With an index the files are those it names. Raises CheckpointError when there are none.
    """
    names = sorted(names)
    weights = tuple(name for name in names if name.endswith(".safetensors"))
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if SINGLE in weights:
        return (SINGLE,), None
    if indexes:
        return (), INDEX if INDEX in indexes else indexes[0]
    if ADAPTER in weights:
        return (ADAPTER,), None
    if weights:
        return weights, None
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        found = (
            f"only {', '.join(pickles[:3])}: such files can hold pickles, whose loading runs code, and are never opened"
        )
        raise CheckpointError(place, found, "convert them to safetensors where you trust them")
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "nothing"
    raise CheckpointError(place, f"no .safetensors file; it holds {shown}", f"give {FORMS}")


def read_headers(
    folder: Path, files: Iterable[str], say: Say, *, follow: bool = False
) -> tuple[tuple[Header, ...], tuple[Unread, ...]]:
    """The headers of the named files of a folder, and those that could not be had.

    `follow`: the user named this very file, so a link is followed wherever it leads.
    """
    found: list[Header | Unread] = []
    files = list(files)
    for place, file in enumerate(files, 1):
        say(f"reading header {place} of {len(files)}: {file}")
        try:
            path = folder / file if follow else locate(folder, file)
            found.append(_confirm(read_header(path, file), path))
        except HeaderError as error:
            found.append(as_unread(error))
    return sort_out(found)


def sort_out(found: Iterable[Header | Unread]) -> tuple[tuple[Header, ...], tuple[Unread, ...]]:
    """Headers and files without one. Headers beyond MAX_ALL_TENSORS tensors in all are taken as not readable."""
    headers: list[Header] = []
    unread: list[Unread] = []
    tensors = 0
    for one in found:
        if isinstance(one, Unread):
            unread.append(one)
            continue
        tensors += len(one.tensors)
        if tensors <= MAX_ALL_TENSORS:
            headers.append(one)
        else:
            expected = f"at most {MAX_ALL_TENSORS:,} tensors in all files"
            found_text = f"{tensors:,} tensors up to this file"
            unread.append(Unread(file=one.file, kind="header_too_large", found=found_text, expected=expected))
    return tuple(headers), tuple(unread)


def as_unread(error: HeaderError) -> Unread:
    """The record of a header that could not be had."""
    return Unread(file=error.file, kind=error.kind, found=error.found, expected=error.expected)


def locate(folder: Path, file: str) -> Path:
    """The path of a file that a checkpoint in `folder` names. Raises HeaderError if it is missing or leads outside."""
    if not is_inside(file):
        raise HeaderError(file, "leaves_folder", "an absolute path or one with ..", "a file name inside the folder")
    try:
        real = (folder / file).resolve(strict=True)
    except FileNotFoundError:
        if (folder / file).is_symlink():
            found = f"a link to {os.readlink(folder / file)}, which is not there"
        else:
            found = "no such file"
        raise HeaderError(file, "missing_file", found, "the shard") from None
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle, up to Python 3.12
        reason = getattr(error, "strerror", None) or str(error)
        raise HeaderError(file, "unreadable", reason, "a file that can be opened") from None
    if not any(real.is_relative_to(root) for root in _roots(folder)):
        raise HeaderError(file, "leaves_folder", f"a link to {real}", f"a file inside {folder}")
    return real


def is_inside(file: str) -> bool:
    """Whether a relative path, as an index or a repository names it, stays where it starts on every system."""
    parts = re.split(r"[/\\]", file)
    return bool(file) and "\0" not in file and ".." not in parts and parts[0] != "" and ":" not in parts[0]


def _roots(folder: Path) -> tuple[Path, ...]:
    """Folders a file of this checkpoint may really lie in: its own, and the blobs of a Hub cache's snapshot."""
    real = folder.resolve()
    blobs = real.parent.parent / "blobs"
    return (real, blobs) if real.parent.name == "snapshots" and blobs.is_dir() else (real,)


def _confirm(header: Header, path: Path) -> Header:
    """Let the safetensors library judge what this reader found nothing wrong with: whatever it refuses is not clean."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):
            return header
    except (SafetensorError, OSError) as error:
        if any(KINDS[fault.kind].severity == "error" for fault in header.faults):
            return header
        fault = Fault(kind="refused", tensor=None, expected="a file safetensors opens", found=str(error))
        return replace(header, faults=(*header.faults, fault))


def read_index(path: Path, file: str) -> Index:
    """Read an index. Raises CheckpointError when it is none; entries that cannot be used are faults."""
    return parse_index(_read_small(path), str(path), file)


def _read_index_of(folder: Path, file: str) -> Index:
    try:
        return read_index(locate(folder, file), file)
    except HeaderError as error:
        raise CheckpointError(str(folder / file), error.found, f"it must be {error.expected}") from None


def parse_index(data: bytes, place: str, file: str) -> Index:
    """The index that `data` holds; `place` is how errors call it. Raises CheckpointError."""
    try:
        fields = parse_object(data, limit=MAX_INDEX_BYTES)
    except JsonProblem as problem:
        raise CheckpointError(place, str(problem), "write it anew with --fix-index from its folder") from None
    weight_map = fields.get("weight_map")
    if not isinstance(weight_map, dict):
        found = "JSON without weight_map, so no checkpoint index"
        raise CheckpointError(place, found, f"give {FORMS}; a config.json is the MODEL argument")
    faults = [
        Fault(kind="bad_index", tensor=name, expected="the name of a shard inside the folder", found=repr(shard)[:200])
        for name, shard in weight_map.items()
        if not isinstance(shard, str) or not is_inside(shard)
    ]
    shards = len({shard for shard in weight_map.values() if isinstance(shard, str)})
    if shards > MAX_SHARDS:
        raise CheckpointError(place, f"an index of {shards:,} shards", f"no checkpoint has more than {MAX_SHARDS:,}")
    bad = {fault.tensor for fault in faults}
    metadata = fields.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    total_size = metadata.get("total_size")
    if isinstance(total_size, float) and total_size.is_integer():  # some writers divide
        total_size = int(total_size)
    if total_size is not None and (type(total_size) is not int or total_size < 0):
        faults.append(
            Fault(kind="bad_index", tensor=None, expected="total_size in bytes", found=repr(total_size)[:200])
        )
        total_size = None
    return Index(
        file=file,
        weight_map={name: shard for name, shard in weight_map.items() if name not in bad},
        total_size=total_size,
        metadata=metadata,
        faults=tuple(faults),
    )


def _adapter_config(folder: Path) -> dict[str, Any] | None:
    path = folder / ADAPTER_CONFIG
    try:
        return parse_object(_read_small(path)) if path.exists() else None
    except JsonProblem as problem:
        raise CheckpointError(str(path), str(problem), "mend the file, or save the adapter again") from None


def _read_small(path: Path) -> bytes:
    """The bytes of a regular file, at most one more than an index may have; a pipe is not waited for."""
    try:
        if not path.is_file():
            raise CheckpointError(str(path), "no such file" if not path.exists() else "not a file", f"give {FORMS}")
        with path.open("rb") as stream:
            return stream.read(MAX_INDEX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(str(path), reason, f"give {FORMS}") from None


def _list(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry, _ in zip(entries, range(MAX_ENTRIES), strict=False)]
    except OSError as error:
        raise CheckpointError(str(folder), error.strerror or str(error), f"give {FORMS}") from None
    return names
