"""A zoo of checkpoints that are not what they say: each makes files in a folder and names what must be found in them.

`header()` writes a safetensors file from a header as it is given, right or wrong; nothing here uses the library.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OK = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
FLOAT = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
NEXT = {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}


@dataclass(frozen=True)
class Bad:
    """`make` fills a folder and returns the path to check (None: the folder). `kind`: the finding that names it."""

    name: str
    kind: str
    make: Callable[[Path], Path | None]
    words: str = ""  # a part of the finding that says what was there


def header(fields: Any, data: bytes = b"\0" * 4, *, length: int | None = None, pad: int = 8) -> bytes:
    """The bytes of a file with this header: a value for JSON, or text or bytes taken as they are."""
    if isinstance(fields, str):
        fields = fields.encode()
    document = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    document += b" " * (-len(document) % pad)
    return struct.pack("<Q", len(document) if length is None else length) + document + data


def good(names: tuple[str, ...] = ("a",)) -> bytes:
    """A file without fault: 4 bytes for each name."""
    entries = {name: {**OK, "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)}
    return header(entries, b"\1\2\3\4" * len(names))


def index(weight_map: Any, total_size: Any = None) -> str:
    """The text of an index."""
    metadata = {} if total_size is None else {"total_size": total_size}
    return json.dumps({"metadata": metadata, "weight_map": weight_map})


def _file(content: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / "model.safetensors"
        path.write_bytes(content)
        return path

    return make


def _folder(**files: bytes | str) -> Callable[[Path], None]:
    """Files by name, with __ for a dot."""

    def make(folder: Path) -> None:
        for name, content in files.items():
            path = folder / name.replace("__", ".")
            path.write_bytes(content) if isinstance(content, bytes) else path.write_text(content)

    return make


def _zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"cos\nsystem\n(S'true'\ntR.")
    return buffer.getvalue()


def _entry(**changes: Any) -> bytes:
    return header({"a": {**OK, **changes}})


def _deep(depth: int) -> str:
    return '{"a":' + "[" * depth + "]" * depth + "}"


FILES = (
    Bad("empty", "empty_file", _file(b"")),
    Bad("seven bytes", "header_too_short", _file(b"1234567"), "7 bytes"),
    Bad("length without header", "header_beyond_file", _file(struct.pack("<Q", 64)), "64 bytes"),
    Bad("length of 2^63", "header_too_large", _file(struct.pack("<Q", 2**63) + b"{}")),
    Bad("length of 100 MB", "header_too_large", _file(header({"a": OK}, length=100_000_001))),
    Bad("length past the end", "header_beyond_file", _file(header({"a": OK}, length=500)), "500 bytes"),
    Bad("header cut short", "header_beyond_file", _file(good()[:40])),
    Bad("no header", "header_not_json", _file(header(b"", pad=1))),
    Bad("not JSON", "header_not_json", _file(header("{'a': 1}"))),
    Bad("JSON with a NaN", "header_not_json", _file(header('{"a": NaN}')), "NaN"),
    Bad("an integer of 5000 digits", "header_not_json", _file(header('{"a":' + "9" * 5000 + "}"))),
    Bad("nested lists", "header_not_json", _file(header(_deep(50_000))), "nested"),
    Bad("a million lists", "header_too_large", _file(header('{"a":[' + "[]," * 700_000 + "[]]}"))),
    Bad("a NUL behind the header", "header_not_json", _file(header(b'{"a": 1}\0'))),
    Bad("a list", "header_not_object", _file(header([OK])), "list"),
    Bad("a string", "header_not_object", _file(header('"a"'))),
    Bad("Latin-1 names", "header_not_utf8", _file(header(b'{"\xe9": 1}')), "0xe9"),
    Bad("a pickle", "pickle_file", _file(pickle.dumps({"a": list(range(100))}))),
    Bad("a torch.save archive", "zip_file", _file(_zip())),
    Bad(
        "a Git LFS pointer", "lfs_pointer", _file(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    ),
    Bad("a login page", "web_page", _file(b"<!DOCTYPE html><html><body>Please log in</body></html>")),
    Bad("an index named as weights", "index_as_weights", _file(index({"a": "b"}).encode())),
    Bad("a GGUF file", "other_format", _file(b"GGUF" + b"\3\0\0\0" * 8), "GGUF"),
    Bad("gzip", "other_format", _file(b"\x1f\x8b\x08\0\1\2\3\4\5\6\7\x08" * 4), "gzip"),
    Bad("HDF5", "other_format", _file(b"\x89HDF\r\n\x1a\n" + b"\0" * 64), "HDF5"),
    Bad("a name twice", "duplicate_name", _file(header(f'{{"a": {json.dumps(OK)}, "a": {json.dumps(OK)}}}'))),
    Bad("an entry that is null", "bad_entry", _file(header({"a": None}, b"")), "None"),
    Bad("an entry without dtype", "bad_entry", _file(header({"a": {"shape": [4], "data_offsets": [0, 4]}}))),
    Bad("a dtype of another library", "unknown_dtype", _file(_entry(dtype="float32")), "float32"),
    Bad("a dtype that is a number", "unknown_dtype", _file(_entry(dtype=32))),
    Bad("a negative dimension", "bad_shape", _file(_entry(shape=[-4])), "-4"),
    Bad("a fractional dimension", "bad_shape", _file(_entry(shape=[4.0])), "4.0"),
    Bad("a dimension that is true", "bad_shape", _file(_entry(shape=[True]))),
    Bad("a dimension of 2^64", "bad_shape", _file(_entry(shape=[2**64]))),
    Bad("a thousand dimensions", "bad_shape", _file(_entry(shape=[1] * 1000))),
    Bad("a shape that is text", "bad_shape", _file(_entry(shape="4"))),
    Bad("offsets backwards", "bad_offsets", _file(_entry(data_offsets=[4, 0]))),
    Bad("three offsets", "bad_offsets", _file(_entry(data_offsets=[0, 2, 4]))),
    Bad("negative offsets", "bad_offsets", _file(_entry(data_offsets=[-4, 0]))),
    Bad("offsets past the end", "truncated", _file(_entry(shape=[400], data_offsets=[0, 400])), "4 bytes"),
    Bad("fewer bytes than the shape", "byte_size", _file(_entry(dtype="F32")), "4 bytes"),
    Bad("more bytes than the shape", "byte_size", _file(_entry(shape=[2]))),
    Bad("a product that overflows", "byte_size", _file(_entry(shape=[2**40, 2**40]))),
    Bad(
        "half a byte", "byte_size", _file(header({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}, b"\0\0"))
    ),
    Bad("data cut off", "truncated", _file(good()[:-2]), "2 bytes"),
    Bad("data appended", "trailing_bytes", _file(good() + b"tail"), "4 bytes more"),
    Bad("a hole", "gap", _file(header({"a": OK, "b": {**OK, "data_offsets": [8, 12]}}, b"\0" * 12)), "4 bytes"),
    Bad("a hole at the start", "gap", _file(header({"a": {**OK, "data_offsets": [4, 8]}}, b"\0" * 8))),
    Bad("two tensors in one place", "overlap", _file(header({"a": OK, "b": OK}))),
    Bad(
        "a tensor inside another",
        "overlap",
        _file(header({"a": OK, "b": {**OK, "shape": [1], "data_offsets": [1, 2]}})),
    ),
    Bad("metadata that is a number", "bad_metadata", _file(header({"__metadata__": {"step": 3}, "a": OK})), "int"),
    Bad("metadata that is a list", "bad_metadata", _file(header({"__metadata__": ["pt"], "a": OK}))),
    Bad(
        "metadata of another framework", "metadata", _file(header({"__metadata__": {"format": "mlx"}, "a": OK})), "mlx"
    ),
    Bad("an empty name", "bad_name", _file(header({"": OK}))),
    Bad("a terminal escape as name", "bad_name", _file(header({"\x1b[2Jclean": OK})), "x1b"),
    Bad("half a surrogate as name", "header_not_utf8", _file(header('{"\\ud800": ' + json.dumps(OK) + "}")), "ud800"),
    Bad("half a surrogate as metadata", "header_not_utf8", _file(header('{"__metadata__": {"a": "\\uDC00"}}', b""))),
    Bad(
        "unaligned elements",
        "alignment",
        _file(
            header(
                {
                    "a": {**OK, "shape": [1], "data_offsets": [0, 1]},
                    "b": {**FLOAT, "data_offsets": [1, 5]},
                },
                b"\0" * 5,
            )
        ),
        "byte 1",
    ),
    Bad("an unaligned header", "alignment", _file(header(json.dumps({"a": OK}).ljust(65), pad=1)), "byte 73"),
)
"""Single files, most of which safetensors refuses too, with fewer words."""


def _links(name: str, target: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).symlink_to(target)

    return make


def _outside(folder: Path) -> None:
    other = folder.parent / "outside.safetensors"
    other.write_bytes(good())
    (folder / "model.safetensors.index.json").write_text(index({"a": "model-1.safetensors"}))
    (folder / "model-1.safetensors").symlink_to(other)


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "model.safetensors")


def _directory(folder: Path) -> None:
    (folder / "model.safetensors").mkdir()


def _indexed(weight_map: dict[str, Any], total_size: Any = None, **files: bytes | str) -> Callable[[Path], None]:
    return _folder(model__safetensors__index__json=index(weight_map, total_size), **files)


FOLDERS = (
    Bad("a pipe as shard", "not_a_file", _pipe, "pipe"),
    Bad("a folder as shard", "not_a_file", _directory, "folder"),
    Bad("a link to itself", "unreadable", _links("model.safetensors", "model.safetensors")),
    Bad("a link to nothing", "missing_file", _links("model.safetensors", "gone.safetensors"), "gone"),
    Bad("a link to a device", "leaves_folder", _links("model.safetensors", "/dev/zero"), "/dev/zero"),
    Bad("a link out of the folder", "leaves_folder", _outside, "outside.safetensors"),
    Bad("an index that climbs", "bad_index", _indexed({"a": "../x.safetensors"}), "../x"),
    Bad("an index with an absolute path", "bad_index", _indexed({"a": "/etc/passwd"}), "/etc/passwd"),
    Bad("an index with a Windows path", "bad_index", _indexed({"a": "..\\..\\x.safetensors"})),
    Bad("an index with a drive", "bad_index", _indexed({"a": "C:x.safetensors"})),
    Bad("an index with a NUL", "bad_index", _indexed({"a": "x\0.safetensors"})),
    Bad("an index that maps to a number", "bad_index", _indexed({"a": 3}), "3"),
    Bad("a total that is text", "bad_index", _indexed({"a": "m.safetensors"}, "4 GB", m__safetensors=good()), "4 GB"),
    Bad("a missing shard", "missing_file", _indexed({"a": "m.safetensors"}), "no such file"),
    Bad("a wrong total", "total_size", _indexed({"a": "m.safetensors"}, 5, m__safetensors=good()), "5 bytes"),
    Bad(
        "an index ahead of the shard",
        "not_in_shard",
        _indexed({"a": "m.safetensors", "b": "m.safetensors"}, m__safetensors=good()),
    ),
    Bad("an index behind the shard", "unindexed", _indexed({"a": "m.safetensors"}, m__safetensors=good(("a", "b")))),
    Bad(
        "an index that mixes shards up",
        "wrong_shard",
        _indexed(
            {"a": "n.safetensors", "b": "n.safetensors", "c": "m.safetensors"},
            m__safetensors=good(("a", "c")),
            n__safetensors=good(("b",)),
        ),
        "in m.safetensors",
    ),
    Bad("one shard of two", "missing_shard", _folder(**{"model-1-of-2__safetensors": good()}), "without 2"),
    Bad(
        "two shards without an index",
        "no_index",
        _folder(**{"model-1-of-2__safetensors": good(), "model-2-of-2__safetensors": good(("b",))}),
    ),
    Bad(
        "a shard copied twice",
        "duplicate",
        _folder(**{"model-1-of-2__safetensors": good(), "model-2-of-2__safetensors": good()}),
        "the same data",
    ),
    Bad(
        "two states of one shard",
        "duplicate_differs",
        _folder(**{"model-1-of-2__safetensors": good(), "model-2-of-2__safetensors": header({"a": OK}, b"\7\7\7\7")}),
        "other data",
    ),
    Bad("a leftover beside the model", "stray_file", _folder(model__safetensors=good(), old__safetensors=good()), ""),
)
"""Folders whose files do not fit together, or lead elsewhere."""

REFUSED = (
    ("pytorch_model.bin", "pickle"),
    ("model.pt", "pickle"),
    ("model.pth", "pickle"),
    ("last.ckpt", "pickle"),
    ("weights.pkl", "pickle"),
    ("notes.txt", ".txt"),
)
"""Files that are refused by their names, with a word of the reason."""
