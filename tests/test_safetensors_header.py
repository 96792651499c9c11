"""One header at a time: what is read, and that every fault has its own name."""

import json
import os
import struct
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open
from support.badfiles import FILES, OK, good, header

from introspect.check_kinds import KINDS
from introspect.errors import HeaderError
from introspect.safetensors_header import MAX_HEADER_BYTES, MAX_TENSORS, SHORT_NAMES, STORED_BITS, read_header

TOLERATED = {"duplicate_name", "bad_name", "alignment", "metadata"}
"""Kinds that safetensors opens although they are strange."""
STRICTER = {"a thousand dimensions"}
"""Files that safetensors opens and that no array library could hold."""


def found_in(path):
    """(kind, what was found) of everything wrong with a file, as `check` would say it of the header alone."""
    try:
        read = read_header(path, path.name)
    except HeaderError as error:
        return [(error.kind, error.found)]
    form = (read.metadata or {}).get("format", "pt")
    faults = [(fault.kind, fault.found) for fault in read.faults]
    return faults + ([("metadata", f"format {form}")] if form != "pt" else [])


@pytest.mark.parametrize("bad", FILES, ids=lambda bad: bad.name)
def test_every_bad_file_has_its_own_name(bad, tmp_path):
    kinds = dict(found_in(bad.make(tmp_path)))

    assert bad.kind in kinds
    assert bad.words in kinds[bad.kind]


@pytest.mark.parametrize("bad", FILES, ids=lambda bad: bad.name)
def test_whatever_safetensors_refuses_is_found_and_the_reverse(bad, tmp_path):
    path = bad.make(tmp_path)
    serious = {kind for kind, _ in found_in(path)} - TOLERATED

    try:
        with safe_open(path, framework="np") as file:
            assert isinstance(file.keys(), list)
        refused = False
    except SafetensorError:
        refused = True

    assert bool(serious) == refused or bad.name in STRICTER


def test_every_kind_of_bad_header_is_in_the_zoo():
    about_headers = set(KINDS) - TOLERATED
    used = {bad.kind for bad in FILES}

    assert {bad.kind for bad in FILES} <= set(KINDS)
    assert {kind for kind in about_headers if kind.startswith(("header_", "bad_")) and kind != "bad_index"} <= used
    assert len(FILES) >= 40


def test_a_good_file_is_read_whole(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(
        header({"__metadata__": {"format": "pt"}, "a": OK, "b": {**OK, "data_offsets": [4, 8]}}, b"\0" * 8)
    )

    read = read_header(path, "x.safetensors")

    assert [(t.name, t.dtype, t.shape, t.begin, t.end, t.bytes) for t in read.tensors] == [
        ("a", "U8", (4,), 0, 4, 4),
        ("b", "U8", (4,), 4, 8, 4),
    ]
    assert (read.metadata, read.faults, read.file_bytes) == ({"format": "pt"}, (), path.stat().st_size)
    assert read.data_start + 8 == read.file_bytes


@pytest.mark.parametrize(("dtype", "bits"), STORED_BITS.items())
def test_dtypes_and_their_sizes_are_those_of_safetensors(dtype, bits, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(header({"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, bits]}}, b"\0" * bits))

    assert read_header(path, "x").faults == ()
    with safe_open(path, framework="np") as file:
        assert list(file.keys()) == ["a"]
    assert dtype in SHORT_NAMES


def test_no_dtype_of_safetensors_is_forgotten(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(header({"a": {**OK, "dtype": "NONE"}}))

    with pytest.raises(SafetensorError) as refusal:
        safe_open(path, framework="np")
    known = set(str(refusal.value).split("expected one of ")[1].split(" at line")[0].replace("`", "").split(", "))

    assert known == set(STORED_BITS)


def test_zero_dimensional_and_empty_tensors_are_fine(tmp_path):
    path = tmp_path / "x.safetensors"
    scalar = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    path.write_bytes(header({"none": {**OK, "shape": [0, 7], "data_offsets": [0, 0]}, "scalar": scalar}))

    read = read_header(path, "x")

    assert (read.faults, [t.bytes for t in read.tensors]) == ((), [0, 4])


def test_the_message_names_file_kind_found_and_expected(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 10**6))

    with pytest.raises(HeaderError) as error:
        read_header(path, "x.safetensors")

    assert str(error.value) == (
        "x.safetensors: header beyond file: found a header length of 1,000,000 bytes, "
        "expected at most the 0 bytes that follow"
    )


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**40, 2**64 - 1])
def test_a_huge_length_allocates_nothing(length, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    os.truncate(path, 2**33)  # sparse: there would be bytes to read

    with pytest.raises(HeaderError, match="at most 25,000,000 bytes") as error:
        read_header(path, "x")
    assert error.value.kind == "header_too_large"


def test_more_tensors_than_any_model_has_are_refused_before_parsing(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(header("{" + ",".join(f'"{n}":{{}}' for n in range(MAX_TENSORS + 5)) + "}"))

    with pytest.raises(HeaderError, match="at most 300,000 tensors"):
        read_header(path, "x")


def test_a_pipe_without_a_writer_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(HeaderError, match="found a pipe, expected a regular file"):
        read_header(tmp_path / "pipe", "pipe")


def test_a_header_length_that_looks_like_a_pickle_is_a_length(tmp_path):
    names = {f"tensor_{n:03}": {**OK, "data_offsets": [4 * n, 4 * n + 4]} for n in range(9)}
    document = json.dumps(names).encode()
    document += b" " * (0x0280 - len(document))  # 0x280 is 80 02 in the file, how pickle protocol 2 starts
    path = tmp_path / "x.safetensors"
    path.write_bytes(header(document, b"\0" * 36, pad=1))

    assert path.read_bytes()[:2] == b"\x80\x02"
    assert len(read_header(path, "x").tensors) == 9


SHARED = Path(__file__).parents[2] / "shared" / "models" / "safetensors"


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real headers lie beside the repository, not in it")
@pytest.mark.parametrize(
    ("name", "tensors", "kinds"),
    [
        ("tiny-llama/model.safetensors", 39, set()),
        ("tiny-phi/model-1-of-2.safetensors", 31, set()),
        ("nine-dtypes.safetensors", 9, {"alignment"}),
        ("bloom-176b-last-shard.safetensors", 2, {"alignment"}),
        ("quantised-layers/awq__linear.safetensors", 5, set()),
    ],
)
def test_real_headers(name, tensors, kinds):
    read = read_header(SHARED / name, name)

    assert len(read.tensors) == tensors
    assert {fault.kind for fault in read.faults} == kinds


def test_good_is_good(tmp_path):
    (tmp_path / "x").write_bytes(good(("a", "b")))

    assert read_header(tmp_path / "x", "x").faults == ()
