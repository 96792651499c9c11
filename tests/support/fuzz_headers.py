"""One round of fuzzing: any bytes as a safetensors file. `python fuzz_headers.py -runs=N` lets atheris choose them.

The law: reading ends in a header or in a HeaderError; what safetensors refuses is never without an error; what is found
can be shown.
"""

from __future__ import annotations

import struct
import sys
import tempfile
from pathlib import Path

from safetensors import SafetensorError, safe_open

from introspect.analyzers.check import Params, analyze
from introspect.check_kinds import KINDS
from introspect.check_record import CheckRecord
from introspect.checkpoint import Checkpoint, as_unread
from introspect.errors import HeaderError
from introspect.packed import find_packed, parts_of
from introspect.safetensors_header import parse_file


def examine(data: bytes) -> bool:
    """Check `data` as a file; whether anything serious was found. AssertionError when the law is broken."""
    headers, unread = (), ()
    try:
        headers = (parse_file(lambda begin, end: data[begin:end], "x.safetensors", len(data)),)
    except HeaderError as error:
        unread = (as_unread(error),)
    checkpoint = Checkpoint(source="fuzz", kind="file", headers=headers, unread=unread)
    record = CheckRecord(checkpoint=checkpoint, load=None, packed=find_packed(parts_of(checkpoint), 4))
    assert all(KINDS[one.kind].unreadable for one in unread)
    result = analyze(Params(), record)
    for row in result.tables["findings"].rows:
        for value in row.values():
            assert not isinstance(value, str) or value.isprintable(), value
    return any(row["severity"] == "error" for row in result.tables["findings"].rows)


def refused(data: bytes) -> bool:
    """Whether safetensors refuses these bytes as a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.safetensors")
        path.write_bytes(data)
        try:
            with safe_open(path, framework="np"):
                return False
        except (SafetensorError, OSError):
            return True


def one_input(data: bytes) -> None:
    """Both laws for `data` as it is, and as a header with a true length."""
    for file in (data, struct.pack("<Q", len(data)) + data):
        found = examine(file)
        assert found or not refused(file), file


if __name__ == "__main__":
    import atheris

    atheris.instrument_all()
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
