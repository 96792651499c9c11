"""What is gathered for `check`: which model belongs to which files; the zoo of bad files through the whole command."""

import json
import shutil
from pathlib import Path

import pytest
from support.badfiles import FILES, FOLDERS, REFUSED, good, header, index

from introspect import analyze
from introspect.check_kinds import KINDS
from introspect.checkpoint import MAX_SHARDS
from introspect.cli import main
from introspect.errors import CheckpointError, IntrospectError, OptionError

SHARED = Path(__file__).parents[3] / "shared" / "models" / "safetensors"


def check(*arguments, **options):
    """The findings by kind, and the result."""
    names = [None if argument is None else str(argument) for argument in arguments]
    result = analyze("check", names[0], checkpoint=names[1] if len(names) > 1 else None, **options)
    rows = result.tables["findings"].rows
    return {row["kind"]: row for row in rows}, result


@pytest.mark.parametrize("bad", FILES + FOLDERS, ids=lambda bad: bad.name)
def test_every_bad_checkpoint_is_one_named_finding(bad, tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    path = bad.make(folder) or folder

    findings, result = check(path)

    row = findings[bad.kind]
    kind = KINDS[bad.kind]
    assert (row["severity"], row["count"] >= 1) == (kind.severity, True)
    assert row["cause"] == kind.cause
    assert row["remedy"] == kind.remedy
    assert bad.words in row["found"]
    assert result.findings == (kind.severity != "note")
    assert result.unreadable == kind.unreadable


@pytest.mark.parametrize("bad", FILES + FOLDERS, ids=lambda bad: bad.name)
def test_exit_codes_and_a_terminal_that_is_safe(bad, tmp_path, capsys):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    path = bad.make(folder) or folder

    code = main(["check", str(path)])

    kind = KINDS[bad.kind]
    assert code == (2 if kind.unreadable else 0 if kind.severity == "note" else 1)
    out = capsys.readouterr().out
    out.encode()
    assert "\x1b" not in out
    assert "\0" not in out


@pytest.mark.parametrize(("name", "reason"), REFUSED)
@pytest.mark.parametrize("present", [True, False], ids=["here", "not here"])
def test_what_may_hold_a_pickle_is_refused_by_name(name, reason, present, tmp_path):
    path = tmp_path / name
    if present or reason != "pickle":
        path.write_bytes(b"\x80\x04.")

    with pytest.raises(CheckpointError, match=reason):
        check(path)


def test_a_folder_of_pickles_says_so(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")

    with pytest.raises(CheckpointError, match=r"only pytorch_model\.bin: .* never opened; convert them to safetensors"):
        check(tmp_path)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no .safetensors file; it holds nothing"),
        ({"README.md": ""}, "it holds README.md; give a .safetensors file, a folder, an index.json or a Hub id"),
        ({"model.safetensors.index.json": "{"}, "not JSON"),
        ({"model.safetensors.index.json": "{}"}, "JSON without weight_map, so no checkpoint index"),
        ({"model.safetensors.index.json": '{"weight_map": 3}'}, "JSON without weight_map"),
        ({"model.safetensors.index.json": '{"weight_map": {}, "weight_map": {}}'}, "key 'weight_map' appears twice"),
    ],
)
def test_a_folder_without_a_checkpoint(files, words, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    with pytest.raises(CheckpointError) as error:
        check(tmp_path)
    assert words in str(error.value)


def test_nothing_given():
    with pytest.raises(OptionError, match=r"CHECKPOINT: got None, expected a \.safetensors file"):
        check(None)


@pytest.mark.parametrize("name", ["no/such/path.safetensors", "a" * 300 + "/b", "bad\0name", "two words"])
def test_a_name_that_is_nothing(name):
    with pytest.raises(IntrospectError):
        check(None, name, offline=True)


def test_a_file_alone_is_judged_alone_without_torch(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(good())

    findings, result = check(tmp_path / "x.safetensors")

    assert (findings, result.findings, result.model) == ({}, False, None)
    assert result.totals["missing"] is None
    assert result.totals["bytes"] == 4
    assert any("judged alone" in note for note in result.notes)


def test_the_config_beside_the_file_is_the_model(tiny_llama):
    findings, result = check(tiny_llama / "model.safetensors")

    assert (findings, result.findings) == ({}, False)
    assert result.model["class"] == "LlamaForCausalLM"
    assert result.totals["missing"] == result.totals["unexpected"] == result.totals["shape_mismatch"] == 0


@pytest.mark.parametrize("only", ["folder", "config", "file"])
def test_one_argument_stands_for_both(tiny_llama, only):
    argument = {"folder": tiny_llama, "config": tiny_llama / "config.json", "file": tiny_llama / "model.safetensors"}

    _, result = check(argument[only])

    assert result.model["class"] == "LlamaForCausalLM"
    assert (result.totals["tensors"], result.findings) == (21, False)


def test_files_only_asks_no_model(tiny_llama):
    _, result = check(tiny_llama, files_only=True)

    assert (result.model, result.totals["missing"]) == (None, None)


def test_an_index_alone_says_what_it_cannot_tell(tiny_llama, tmp_path):
    from introspect.safetensors_header import read_header

    tensors = read_header(tiny_llama / "model.safetensors", "model.safetensors").tensors
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(index({t.name: "model.safetensors" for t in tensors}, sum(t.bytes for t in tensors)))

    findings, result = check(tiny_llama, path)

    assert findings == {}
    assert result.totals["bytes"] == sum(tensor.bytes for tensor in tensors)
    assert "an index holds names and a total size only" in " ".join(result.notes)


def test_a_total_of_twice_the_bytes_is_another_dtype(tiny_llama, tmp_path):
    from introspect.safetensors_header import read_header

    tensors = read_header(tiny_llama / "model.safetensors", "model.safetensors").tensors
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(index({t.name: "m.safetensors" for t in tensors}, 2 * sum(t.bytes for t in tensors)))

    findings, result = check(tiny_llama, path)

    assert findings["total_size"]["cause"] == "saved with 2 times more bytes per weight than the config's dtype"
    assert result.findings


def test_an_unread_shard_is_a_gap_and_not_missing_tensors(tiny_llama):
    from introspect.safetensors_header import read_header

    names = [t.name for t in read_header(tiny_llama / "model.safetensors", "m").tensors]
    (tiny_llama / "model.safetensors").rename(tiny_llama / "model-1.safetensors")
    (tiny_llama / "model-2.safetensors").write_bytes(b"")
    weight_map = dict.fromkeys(names, "model-1.safetensors") | {names[0]: "model-2.safetensors"}
    (tiny_llama / "model.safetensors.index.json").write_text(index(weight_map))

    findings, result = check(tiny_llama)

    assert result.unreadable
    assert findings["empty_file"]["file"] == "model-2.safetensors"
    assert result.totals["missing"] == 0


def test_a_hub_cache_snapshot_may_point_to_its_blobs(tmp_path):
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / ("0" * 40)
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "cafe").write_bytes(good())
    (snapshot / "model.safetensors").symlink_to(Path("..", "..", "blobs", "cafe"))

    findings, _ = check(snapshot)

    assert findings == {}


def test_a_file_the_user_names_may_be_a_link(tmp_path):
    (tmp_path / "real").write_bytes(good())
    (tmp_path / "x.safetensors").symlink_to(tmp_path / "real")

    assert check(tmp_path / "x.safetensors")[0] == {}


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real headers lie beside the repository, not in it")
def test_two_shards_that_hold_the_same_names():
    findings, result = check(SHARED / "tiny-phi")

    assert findings["duplicate"]["count"] == 31
    assert findings["duplicate"]["found"] == "all of them here again, the same data"
    assert findings["no_index"]["severity"] == "warning"
    assert (result.totals["missing"], result.totals["unexpected"]) == (0, 0)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real headers lie beside the repository, not in it")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("awq__linear", "AWQ: a matrix [128, 256] (4-bit, groups of 128)"),
        ("fp8__linear", "fp8: a matrix [256, 256] (8-bit, blocks of 128 x 128)"),
        ("compressed_tensors__linear_w8a8fp8", "fp8: a matrix [256, 256] (8-bit, one scale per row)"),
        (
            "compressed_tensors__linear_wna16",
            "compressed-tensors packed integers: a matrix [256, 256] (4-bit, groups of 128)",
        ),
        ("compressed_tensors__moe_wna16", "bits per weight only the config tells (4 scales per row)"),
    ],
)
def test_quantised_layers_are_explained(name, words):
    _, result = check(SHARED / "quantised-layers" / f"{name}.safetensors")

    rows = [row["expected"] for row in result.tables["findings"].rows if row["kind"] == "packed"]
    assert any(words in text for text in rows)
    assert not result.findings


def test_an_index_of_more_shards_than_any_model_has(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(index({f"t{n}": f"{n}.safetensors" for n in range(MAX_SHARDS + 1)}))

    with pytest.raises(CheckpointError, match="an index of 10,001 shards"):
        check(tmp_path)


def test_more_tensors_than_any_model_has_in_all(tmp_path, monkeypatch):
    monkeypatch.setattr("introspect.checkpoint.MAX_ALL_TENSORS", 3)
    (tmp_path / "m-1-of-2.safetensors").write_bytes(good(("a", "b")))
    (tmp_path / "m-2-of-2.safetensors").write_bytes(good(("c", "d")))

    findings, result = check(tmp_path)

    assert (findings["header_too_large"]["file"], result.unreadable) == ("m-2-of-2.safetensors", True)


def test_fix_index_writes_what_the_headers_say(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "m-1-of-2.safetensors").write_bytes(good(("a", "b")))
    (folder / "m-2-of-2.safetensors").write_bytes(header({"c": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1, "made": "by hand"}, "weight_map": {
            "a": "m-2-of-2.safetensors", "c": "m-2-of-2.safetensors", "b": "m-1-of-2.safetensors"}})
    )  # fmt: skip
    out = tmp_path / "new.json"

    before, _ = check(folder, fix_index=str(out))

    assert {"wrong_shard", "total_size"} <= before.keys()
    assert json.loads(out.read_text()) == {
        "metadata": {"total_size": 12, "made": "by hand"},
        "weight_map": {"a": "m-1-of-2.safetensors", "b": "m-1-of-2.safetensors", "c": "m-2-of-2.safetensors"},
    }
    shutil.copy(out, folder / "model.safetensors.index.json")
    assert check(folder)[0] == {}


def test_fix_index_never_overwrites(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(good())
    (tmp_path / "old.json").write_text("precious")

    with pytest.raises(OptionError, match="a file that does not exist yet"):
        check(tmp_path, fix_index=str(tmp_path / "old.json"))
    assert (tmp_path / "old.json").read_text() == "precious"


def test_fix_index_refuses_to_lose_tensors(tmp_path):
    (tmp_path / "m-1-of-2.safetensors").write_bytes(good())
    (tmp_path / "m-2-of-2.safetensors").write_bytes(b"")

    with pytest.raises(CheckpointError, match=r"no header of m-2-of-2\.safetensors"):
        check(tmp_path, fix_index=str(tmp_path / "new.json"))
    assert not (tmp_path / "new.json").exists()
