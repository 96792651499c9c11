"""Whether two stored tensors hold the same data: read in blocks, never more than SAMPLED_BYTES of each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from introspect.check_record import SameBytes, Tie
from introspect.checkpoint import Checkpoint, locate
from introspect.errors import HeaderError
from introspect.safetensors_header import Header, StoredTensor

BLOCK_BYTES = 64 * 1024
SAMPLED_BYTES = 16 * 2**20
MOST_PAIRS = 512

Place = tuple[Header, StoredTensor]


def compare_bytes(checkpoint: Checkpoint, ties: tuple[Tie, ...]) -> tuple[SameBytes, ...]:
    """Compare what is stored twice: a name in two files, and both names of a tie. Only where the files are here."""
    if checkpoint.folder is None:
        return ()
    places: dict[str, list[Place]] = {}
    for header in checkpoint.headers:
        for tensor in header.tensors:
            places.setdefault(tensor.name, []).append((header, tensor))
    pairs = [(found[0], other) for found in places.values() for other in found[1:]]
    pairs += [(places[tie.kept][0], places[tie.tied][0]) for tie in ties if tie.kept in places and tie.tied in places]
    compared = (_compare(checkpoint, first, second) for first, second in pairs[:MOST_PAIRS])
    return tuple(one for one in compared if one is not None)


def _compare(checkpoint: Checkpoint, first: Place, second: Place) -> SameBytes | None:
    """None when a file cannot be read that far."""
    (header_a, a), (header_b, b) = first, second
    sampled = a.bytes > SAMPLED_BYTES
    equal = (a.dtype, a.shape, a.bytes) == (b.dtype, b.shape, b.bytes)
    if equal:
        try:
            paths = _path(checkpoint, header_a), _path(checkpoint, header_b)
            equal = _equal_data(*paths, _start(first), _start(second), a.bytes)
        except (OSError, HeaderError):
            return None
    return SameBytes(first=(header_a.file, a.name), second=(header_b.file, b.name), equal=equal, sampled=sampled)


def _equal_data(path_a: Path, path_b: Path, start_a: int, start_b: int, size: int) -> bool:
    with path_a.open("rb") as file_a, path_b.open("rb") as file_b:
        for offset, length in _blocks(size):
            file_a.seek(start_a + offset)
            file_b.seek(start_b + offset)
            if file_a.read(length) != file_b.read(length):
                return False
    return True


def _blocks(size: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of blocks to read: all of a small tensor, of a large one evenly spread ones and both ends."""
    count = -(-min(size, SAMPLED_BYTES) // BLOCK_BYTES)
    last = max(0, size - BLOCK_BYTES)
    for place in range(count):
        offset = last * place // max(1, count - 1) if size > SAMPLED_BYTES else place * BLOCK_BYTES
        yield offset, min(BLOCK_BYTES, size - offset)


def _start(place: Place) -> int:
    header, tensor = place
    return header.data_start + tensor.begin


def _path(checkpoint: Checkpoint, header: Header) -> Path:
    if checkpoint.folder is None:
        raise HeaderError(header.file, "missing_file", "a file on a server", "a file here")
    if checkpoint.kind == "file":  # the user named it, wherever it links to
        return checkpoint.folder / header.file
    return locate(checkpoint.folder, header.file)
