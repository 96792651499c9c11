"""`check` as a pure function of its record."""

from dataclasses import replace

import pytest

from introspect.analyzers.check import Params, analyze
from introspect.check_record import (
    CheckRecord,
    ExpectedTensor,
    Failure,
    LoadRecord,
    SameBytes,
    Tie,
    WrongDtype,
    WrongShape,
)
from introspect.checkpoint import Checkpoint, Index, Unread
from introspect.packed import Packed
from introspect.records import ModelIdentity
from introspect.safetensors_header import Fault, Header, StoredTensor

MODEL = ModelIdentity(id="m", class_name="M", source="test", config_sha256="", config={})
LOAD = LoadRecord(
    model=MODEL,
    route="a test",
    dimensions={"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16},
)


def header(*tensors, file="model.safetensors", faults=()):
    at, found = 0, []
    for name, dtype, shape, size in tensors:
        found.append(StoredTensor(name, dtype, shape, at, at + size))
        at += size
    return Header(file=file, file_bytes=None, data_start=8, tensors=tuple(found), metadata=None, faults=faults)


PLAIN = Checkpoint(source="folder x", kind="folder", headers=(header(("a", "BF16", (2,), 4), ("b", "BF16", (3,), 6)),))


def check(load=LOAD, checkpoint=PLAIN, **more):
    result = analyze(Params(), CheckRecord(checkpoint=checkpoint, load=load, **more))
    return result, list(result.tables["findings"].rows)


def test_the_totals_of_the_contract():
    load = replace(
        LOAD,
        missing=(ExpectedTensor(name="c", shape=(2,), dtype="bf16"),),
        unexpected=("b",),
        wrong_shapes=(WrongShape(name="a", expected=(7,), found=(2,)),),
        wrong_dtypes=(WrongDtype(name="a", expected="fp32", found="bf16"),),
    )

    result, rows = check(load)

    assert result.totals == {
        "tensors": 2,
        "missing": 1,
        "unexpected": 1,
        "shape_mismatch": 1,
        "dtype_mismatch": 1,
        "bytes": 10,  # 2 x 2 + 3 x 2
        "files": 1,
        "errors": 2,
        "warnings": 2,
        "notes": 0,
    }
    assert [row["kind"] for row in rows] == ["missing", "shape", "unexpected", "dtype"]
    assert result.findings
    assert result.model["class"] == "M"


def test_without_a_model_what_needs_one_is_unknown():
    result, _ = check(None)

    assert {name for name, value in result.totals.items() if value is None} == {
        "missing",
        "unexpected",
        "shape_mismatch",
        "dtype_mismatch",
    }


def test_an_unread_file_makes_the_answer_a_gap():
    unread = Unread(file="x", kind="empty_file", found="no bytes at all", expected="a header")

    result, rows = check(None, replace(PLAIN, unread=(unread,)))

    assert (result.unreadable, rows[0]["kind"], result.totals["files"]) == (True, "empty_file", 2)


@pytest.mark.parametrize(("named", "kinds"), [(True, ["dtype"]), (False, [])])
def test_precision_matters_only_against_a_config_that_names_one(named, kinds):
    load = replace(LOAD, dtype_named=named, wrong_dtypes=(WrongDtype(name="a", expected="bf16", found="fp16"),))

    assert [row["kind"] for row in check(load)[1]] == kinds


def test_another_kind_of_number_matters_always():
    load = replace(LOAD, dtype_named=False, wrong_dtypes=(WrongDtype(name="a", expected="bf16", found="int8"),))

    result, rows = check(load)

    assert [row["kind"] for row in rows] == ["dtype_kind"]
    assert result.totals["dtype_mismatch"] == 1


def test_a_failed_conversion_names_parameter_tensors_and_reason():
    load = replace(LOAD, failures=(Failure(parameter="p", names=("a", "b"), reason="sizes differ"),))

    (row,) = check(load)[1]

    assert (row["tensor"], row["found"]) == ("p", "2 tensors, a first: sizes differ")


@pytest.mark.parametrize(
    ("compared", "kind", "found"),
    [
        ((), "tied_stored", "6 bytes, not compared"),
        ((True, False), "tied_stored", "6 bytes, the same data"),
        ((True, True), "tied_stored", "6 bytes, the same data where sampled"),
        ((False, False), "tied_differs", "other data"),
    ],
)
def test_ties(compared, kind, found):
    load = replace(LOAD, ties=(Tie(kept="a", tied="b"),))
    same = [SameBytes(first=("f", "a"), second=("f", "b"), equal=compared[0], sampled=compared[1])] if compared else []

    (row,) = check(load, compared=tuple(same))[1]

    assert (row["kind"], row["found"]) == (kind, found)


@pytest.mark.parametrize(
    ("total", "found"),
    [
        (100, []),
        (200, ["saved with 2 times more bytes per weight than the config's dtype"]),
        (50, ["saved with 2 times fewer bytes per weight than the config's dtype"]),
        (101, ["an index of another save, or a writer that counts otherwise"]),
    ],
)
def test_the_total_of_an_index_against_the_model(total, found):
    index = Index(file="i", weight_map={"a": "f"}, total_size=total, metadata={})
    checkpoint = Checkpoint(source="index", kind="index", index=index)

    result, rows = check(replace(LOAD, expected_bytes=100), checkpoint)

    assert [row["cause"] for row in rows] == found
    assert result.totals["bytes"] == total


def test_packed_parts_are_explained_only_without_a_model():
    packed = (Packed(scheme="AWQ", parameter="w", parts=("a",), shape=(2, 3), bits=4, grouping="groups of 128"),)

    assert check(LOAD, packed=packed)[1] == []
    (row,) = check(None, packed=packed)[1]
    assert row["expected"] == "AWQ: a matrix [2, 3] (4-bit, groups of 128)"


def test_a_lost_part_counts_as_missing():
    packed = (Packed(scheme="AWQ", parameter="w", parts=("a",), lost=("scales",)),)

    result, _ = check(LOAD, packed=packed)

    assert (result.totals["missing"], result.findings) == (1, True)


@pytest.mark.parametrize(
    ("expected", "found", "name", "cause"),
    [
        ((4, 6), (6, 4), "w", "stored transposed ([in, out], as TensorFlow, JAX and Conv1D have it)"),
        (
            (32, 64),
            (128, 64),
            "self_attn.k",
            "keys or values stored for all 8 query heads; the config groups them into 2",
        ),
        ((128, 64), (96, 64), "self_attn.q", "6 heads of 16 where the config says 8"),
        ((128, 64), (96, 64), "mlp.up", "made for another config"),
        ((128, 64), (64, 64), "mlp.up", "made for another config"),  # half, but of one role only
        ((4,), (4, 1), "w", "made for another config"),
        ((4, 5), (6, 7), "w", "made for another config"),
        ((4, 5), (0, 5), "w", "made for another config"),
    ],
)
def test_causes_of_shapes(expected, found, name, cause):
    load = replace(LOAD, wrong_shapes=(WrongShape(name=name, expected=expected, found=found),))

    (row,) = check(load)[1]

    assert row["cause"] == cause


def test_two_roles_cut_alike_are_a_tensor_parallel_shard():
    shapes = (
        WrongShape(name="l.0.up", expected=(128, 64), found=(32, 64)),
        WrongShape(name="l.0.down", expected=(64, 128), found=(64, 32)),
    )

    causes = {row["tensor"]: row["cause"] for row in check(replace(LOAD, wrong_shapes=shapes))[1]}

    assert causes == {
        "l.0.up": "a tensor-parallel shard: one of 4, cut along dimension 0",
        "l.0.down": "a tensor-parallel shard: one of 4, cut along dimension 1",
    }


def test_faults_of_a_header_are_findings_with_their_file():
    fault = Fault(kind="gap", tensor="a", expected="x", found="y")

    (row,) = check(None, replace(PLAIN, headers=(header(file="f", faults=(fault,)),)))[1]

    assert (row["kind"], row["tensor"], row["file"], row["expected"], row["found"]) == ("gap", "a", "f", "x", "y")


def test_a_clean_checkpoint_says_so():
    result, rows = check()

    assert rows == []
    assert not result.findings
    assert "clean" in result.notes[-1]
