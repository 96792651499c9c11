"""Which files make up a checkpoint, and which paths may be followed."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.badfiles import good, index

from introspect.checkpoint import INDEX, choose_files, is_inside, locate, parse_index, read_local
from introspect.errors import CheckpointError, HeaderError
from introspect.fixed_index import fixed_index


@pytest.mark.parametrize(
    ("names", "files", "chosen"),
    [
        (["model.safetensors", INDEX, "model-1-of-1.safetensors"], ("model.safetensors",), None),
        ([INDEX, "model-1-of-1.safetensors"], (), INDEX),
        (["other.safetensors.index.json", "a.safetensors"], (), "other.safetensors.index.json"),
        (["adapter_model.safetensors", "adapter_config.json"], ("adapter_model.safetensors",), None),
        (["b.safetensors", "a.safetensors", "config.json"], ("a.safetensors", "b.safetensors"), None),
        (["a.safetensors", "pytorch_model.bin"], ("a.safetensors",), None),
    ],
)
def test_files_are_chosen_as_transformers_chooses(names, files, chosen):
    assert choose_files("here", names) == (files, chosen)


@pytest.mark.parametrize("name", ["model.safetensors", "sub/model.safetensors", "a..b.safetensors", "..a"])
def test_names_that_stay_inside(name):
    assert is_inside(name)


@pytest.mark.parametrize(
    "name",
    ["", "/etc/passwd", "../x", "a/../../x", "a\\..\\x", "\\\\host\\share", "C:x", "C:\\x", "a\0b", "..", "//x"],
)
def test_names_that_do_not(name):
    assert not is_inside(name)


@given(st.text(max_size=30))
def test_whatever_an_index_says_nothing_outside_is_opened(name):
    """`locate` gives a path inside the folder or says why not; it never leaves it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcome = locate(Path(folder), name).is_relative_to(Path(folder).resolve())
        except HeaderError as error:
            outcome = error.kind

    assert outcome in (True, "leaves_folder", "missing_file", "unreadable")


def test_links_through_folders_are_seen_through(tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    folder.mkdir()
    (outside / "x.safetensors").write_bytes(good())
    (folder / "sub").symlink_to(outside)

    with pytest.raises(HeaderError, match="expected a file inside"):
        locate(folder, "sub/x.safetensors")


def test_a_folder_that_is_itself_a_link_is_fine(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "model.safetensors").write_bytes(good())
    (tmp_path / "link").symlink_to(tmp_path / "real")

    assert len(read_local(tmp_path / "link").headers) == 1


def test_progress_is_told_of_each_shard(tmp_path):
    said = []
    for number in (1, 2):
        (tmp_path / f"m-{number}-of-2.safetensors").write_bytes(good((f"t{number}",)))

    read_local(tmp_path, said.append)

    assert said == [f"reading header {n} of 2: m-{n}-of-2.safetensors" for n in (1, 2)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the file is empty"),
        ("[]", "the JSON is a list, not an object"),
        ('{"metadata": {}}', "JSON without weight_map"),
        ('{"weight_map": []}', "JSON without weight_map"),
    ],
)
def test_what_is_no_index(text, words):
    with pytest.raises(CheckpointError, match=words):
        parse_index(text.encode(), "here", "i.json")


def test_metadata_of_an_index_is_not_trusted():
    read = parse_index(b'{"weight_map": {"a": "m"}, "metadata": [1]}', "here", "i.json")

    assert (read.total_size, read.metadata, read.files) == (None, {}, ("m",))
    assert parse_index(index({}, 8.0).encode(), "here", "i").total_size == 8
    assert parse_index(index({}, True).encode(), "here", "i").faults[0].kind == "bad_index"


def test_a_folder_that_may_not_be_read(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    tmp_path.chmod(0)
    try:
        with pytest.raises(CheckpointError, match="Permission denied"):
            read_local(tmp_path)
    finally:
        tmp_path.chmod(0o700)


def test_a_corrected_index_keeps_the_old_place_of_a_tensor_that_is_in_two(tmp_path):
    (tmp_path / "m1.safetensors").write_bytes(good(("a", "b")))
    (tmp_path / "m2.safetensors").write_bytes(good(("a",)))
    (tmp_path / INDEX).write_text(index({"a": "m2.safetensors", "b": "m1.safetensors"}))

    fixed = fixed_index(read_local(tmp_path))

    assert fixed == {
        "metadata": {"total_size": 8},
        "weight_map": {"a": "m2.safetensors", "b": "m1.safetensors"},
    }
