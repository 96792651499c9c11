"""The header of one safetensors file, read without trusting it: bounded, standard library only, no weight is touched.

Layout: 8 bytes little-endian N, N bytes of JSON {name: {dtype, shape, data_offsets: [begin, end]}}, then the data,
which the tensors must cover without hole or overlap. The safetensors library says one sentence on the first thing wrong
and accepts a name written twice; this reader names every fault. What stops the reading is a HeaderError, what a
readable header says wrongly is a Fault. MAX_HEADER_BYTES and MAX_TENSORS bound the memory at about 0.5 GB.
"""

from __future__ import annotations

import json
import os
import reprlib
import stat
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from introspect.errors import HeaderError

MAX_HEADER_BYTES = 25_000_000
"""huggingface_hub's own limit; the largest real header seen (of 16,000 tensors) takes 2 MB."""
MAX_TENSORS = 300_000
MAX_DIMENSIONS = 64  # numpy's; a product over more would only cost time

STORED_BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
"""Bits per element of every dtype that safetensors 0.8 knows, by the name written in the header."""

SHORT_NAMES: dict[str, str] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16", "C64": "complex64",
    "F8_E5M2": "fp8_e5m2", "F8_E4M3": "fp8_e4m3fn", "F8_E8M0": "fp8_e8m0fnu", "F8_E4M3FNUZ": "fp8_e4m3fnuz",
    "F8_E5M2FNUZ": "fp8_e5m2fnuz", "F6_E2M3": "fp6_e2m3", "F6_E3M2": "fp6_e3m2", "F4": "fp4_e2m1fn_x2",
}  # fmt: skip
"""The same dtypes by this package's short names (introspect.units has no fp6: torch neither)."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as the header describes it. `begin` and `end` are byte offsets from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def bytes(self) -> int:
        """Bytes it takes in the file."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something a header or an index says wrongly. `kind` is in introspect.check_kinds; `tensor` None: the file."""

    kind: str
    tensor: str | None
    expected: str
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What one file says it holds, unusable entries left out. `file_bytes` None: the server did not tell."""

    file: str
    file_bytes: int | None
    data_start: int
    tensors: tuple[StoredTensor, ...]
    metadata: dict[str, str] | None
    faults: tuple[Fault, ...]


def read_header(path: Path, file: str) -> Header:
    """Read the header of the file at `path`, called `file` in messages. Raises HeaderError.

    The file is opened once and judged through that descriptor; a pipe or a device is never waited for.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise HeaderError(file, "unreadable", error.strerror or str(error), "a file that can be opened") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise HeaderError(file, "not_a_file", _describe_mode(status.st_mode), "a regular file")
        return parse_file(lambda begin, end: _read_span(descriptor, begin, end), file, status.st_size)
    except OSError as error:
        raise HeaderError(file, "unreadable", error.strerror or str(error), "a file that can be read") from None
    finally:
        os.close(descriptor)


def parse_file(span: Callable[[int, int], bytes], file: str, file_bytes: int | None) -> Header:
    """Read a header through `span(begin, end)`, which gives those bytes of the file, fewer at its end."""
    length = header_length(span(0, 64), file, file_bytes)
    document = span(8, 8 + length)
    if len(document) < length:
        raise HeaderError(file, "header_beyond_file", f"{len(document)} bytes of header", f"{length} bytes of header")
    return parse_header(document, file, file_bytes)


def header_length(head: bytes, file: str, file_bytes: int | None) -> int:
    """N of the first 8 bytes, once it is credible. `head` is the first 64 bytes of the file, or all it has."""
    if not head:
        raise HeaderError(file, "empty_file", "no bytes at all", "8 bytes of header length, a header and data")
    length = int.from_bytes(head[:8], "little")
    beyond = file_bytes is not None and 8 + length > file_bytes
    if (len(head) < 8 or length > MAX_HEADER_BYTES or beyond) and (other := _other_format(head)):
        raise HeaderError(file, *other, "safetensors data")
    if len(head) < 8:
        raise HeaderError(file, "header_too_short", f"{len(head)} bytes", "at least 8 bytes of header length")
    if length > MAX_HEADER_BYTES:
        expected = f"at most {MAX_HEADER_BYTES:,} bytes"
        raise HeaderError(file, "header_too_large", f"a header length of {length:,} bytes", expected)
    if file_bytes is not None and beyond:
        expected = f"at most the {file_bytes - 8:,} bytes that follow"
        raise HeaderError(file, "header_beyond_file", f"a header length of {length:,} bytes", expected)
    return length


def parse_header(document: bytes, file: str, file_bytes: int | None) -> Header:
    """The header whose N bytes of JSON are `document`. Raises HeaderError when it is no JSON object of bounded size."""
    if document.count(b"{") > MAX_TENSORS + 2 or document.count(b"[") > 2 * MAX_TENSORS:
        raise HeaderError(
            file, "header_too_large", "more brackets than tensors fit", f"at most {MAX_TENSORS:,} tensors"
        )
    twice: list[str] = []
    fields = _parse_json(document, file, twice)
    data_start = 8 + len(document)
    faults = [_fault("duplicate_name", name, "each name once", "the same name again") for name in dict.fromkeys(twice)]
    metadata, more = _metadata(fields.pop("__metadata__", None))
    faults += more
    tensors: list[StoredTensor] = []
    for name, entry in fields.items():
        tensor, fault = _tensor(name, entry)
        if tensor is not None:
            tensors.append(tensor)
        if fault is not None:
            faults.append(fault)
    faults += _layout(tensors, None if file_bytes is None else file_bytes - data_start)
    if data_start % 8:
        faults.append(
            _fault("alignment", None, "data starting at a multiple of 8", f"data starting at byte {data_start}")
        )
    return Header(
        file=file,
        file_bytes=file_bytes,
        data_start=data_start,
        tensors=tuple(tensors),
        metadata=metadata,
        faults=tuple(faults),
    )


def _parse_json(document: bytes, file: str, twice: list[str]) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            seen: set[str] = set()
            twice.extend(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        return fields

    def no_constant(text: str) -> None:
        raise ValueError(f"{text} is no JSON number")

    try:
        value = json.loads(document.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant)
    except UnicodeDecodeError as error:
        found = f"byte {error.object[error.start]:#04x} at header byte {error.start}"
        raise HeaderError(file, "header_not_utf8", found, "UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise HeaderError(file, "header_not_json", f"{error.msg} at header byte {error.pos}", "JSON") from None
    except RecursionError:
        raise HeaderError(file, "header_not_json", "values nested hundreds deep", "JSON of three levels") from None
    except ValueError as error:
        raise HeaderError(file, "header_not_json", str(error), "JSON") from None
    if not isinstance(value, dict):
        raise HeaderError(file, "header_not_object", f"a JSON {type(value).__name__}", "a JSON object of tensors")
    if b"\\ud" in document.lower() and (half := _lone_surrogate(value)) is not None:
        raise HeaderError(file, "header_not_utf8", f"half a surrogate pair in {half}", "text that UTF-8 can hold")
    return value


def _lone_surrogate(fields: dict[str, Any]) -> str | None:
    """A name or metadata text that no UTF-8 can hold: JSON may write half of a pair as an escape."""
    metadata = fields.get("__metadata__")
    pairs = metadata.items() if isinstance(metadata, dict) else ()
    for text in [*fields, *(text for pair in pairs for text in pair if isinstance(text, str))]:
        try:
            text.encode()
        except UnicodeEncodeError:
            return reprlib.repr(text)
    return None


def _metadata(value: Any) -> tuple[dict[str, str] | None, list[Fault]]:
    """`__metadata__` must map text to text: the safetensors library refuses the file otherwise."""
    if value is None:
        return None, []
    if not isinstance(value, dict):
        return None, [_fault("bad_metadata", None, "__metadata__ as an object of texts", f"a {type(value).__name__}")]
    wrong = [key for key, item in value.items() if not isinstance(item, str)]
    texts = {key: item for key, item in value.items() if isinstance(item, str)}
    faults = [
        _fault("bad_metadata", None, "text for every key of __metadata__", f"{key!r} is a {type(value[key]).__name__}")
        for key in wrong[:1]
    ]
    return texts, faults


def _tensor(name: str, entry: Any) -> tuple[StoredTensor | None, Fault | None]:
    """The tensor an entry describes, None when it cannot be used, and what is wrong with it."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        return None, _fault("bad_entry", name, "an object with dtype, shape and data_offsets", reprlib.repr(entry))
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in STORED_BITS:
        return None, _fault("unknown_dtype", name, "a dtype of safetensors, as BF16", reprlib.repr(dtype))
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(_is_size, shape)):
        return None, _fault(
            "bad_shape", name, f"at most {MAX_DIMENSIONS} whole numbers from 0 to 2^63", reprlib.repr(shape)
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        return None, _fault("bad_offsets", name, "[begin, end] as whole numbers from 0 to 2^63", reprlib.repr(offsets))
    begin, end = offsets
    if end < begin:
        return None, _fault("bad_offsets", name, "an end not before its begin", reprlib.repr(offsets))
    tensor = StoredTensor(name, dtype, tuple(shape), begin, end)
    bits = prod(shape) * STORED_BITS[dtype]
    if bits % 8:
        return tensor, _fault("byte_size", name, "a whole number of bytes", f"{bits} bits for {dtype} {shape}")
    if bits // 8 != end - begin:
        expected = f"{bits // 8:,} bytes for {dtype} {shape}"
        return tensor, _fault("byte_size", name, expected, f"{end - begin:,} bytes in the file")
    if not name or not name.isprintable():
        return tensor, _fault("bad_name", name, "a name of printable characters", ascii(name))
    return tensor, None


def _layout(tensors: list[StoredTensor], data_bytes: int | None) -> list[Fault]:
    """Holes, overlaps, an end before or after the file's, and elements that no typed view can point at."""
    faults: list[Fault] = []
    reached = 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin > reached:
            found = f"{tensor.begin - reached:,} bytes of no tensor before it"
            faults.append(_fault("gap", tensor.name, f"data from byte {reached:,} on", found))
        elif tensor.begin < reached:
            found = f"data from byte {tensor.begin:,} on"
            faults.append(_fault("overlap", tensor.name, f"data from byte {reached:,} on", found))
        if tensor.begin % max(1, STORED_BITS[tensor.dtype] // 8):
            found = f"byte {tensor.begin:,} of the data for {tensor.dtype}"
            faults.append(_fault("alignment", tensor.name, "a multiple of the element's size", found))
        if data_bytes is not None and tensor.end > data_bytes:
            expected = f"data up to byte {tensor.end:,}"
            faults.append(_fault("truncated", tensor.name, expected, f"{data_bytes:,} bytes of data"))
        reached = max(reached, tensor.end)
    if data_bytes is not None and data_bytes > reached:
        found = f"{data_bytes - reached:,} bytes more"
        faults.append(_fault("trailing_bytes", None, f"{reached:,} bytes of data", found))
    return faults


_OTHER_FORMATS: tuple[tuple[bytes, str, str], ...] = (
    (b"\x80", "pickle_file", "a pickle, which could run code and is never opened"),
    (b"PK\x03\x04", "zip_file", "a zip archive (torch.save writes these, with a pickle inside), which is never opened"),
    (b"\x1f\x8b", "other_format", "gzip data"),
    (b"GGUF", "other_format", "a GGUF file"),
    (b"\x89HDF", "other_format", "an HDF5 file"),
    (b"version https://git-lfs", "lfs_pointer", "a Git LFS pointer, the text that stands for the file"),
    (b"<!DOCTYPE", "web_page", "a web page"),
    (b"<html", "web_page", "a web page"),
    (b"{", "index_as_weights", "JSON text"),
)  # fmt: skip


def _other_format(head: bytes) -> tuple[str, str] | None:
    """(kind, what it is) of a file that is something else by its first bytes, which are no credible header length."""
    return next(((kind, what) for magic, kind, what in _OTHER_FORMATS if head.startswith(magic)), None)


def _read_span(descriptor: int, begin: int, end: int) -> bytes:
    os.lseek(descriptor, begin, os.SEEK_SET)
    parts: list[bytes] = []
    while begin < end and (part := os.read(descriptor, end - begin)):
        parts.append(part)
        begin += len(part)
    return b"".join(parts)


def _describe_mode(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    return kinds.get(stat.S_IFMT(mode), "a socket or another special file")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _fault(kind: str, tensor: str | None, expected: str, found: str) -> Fault:
    return Fault(kind=kind, tensor=tensor, expected=expected, found=found)
