"""Stored formats: bits by hand, and the very tensors that libraries write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from introspect.formats import Format, Matrix, StoredTensor, format_of, load_formats, load_recipes
from introspect.units import DTYPE_BITS

FORMATS = load_formats()
BITS = {
    "bf16": 16,
    "fp8-tensor": 8 + 32 / 4096**2,
    "fp8-channel": 8 + 32 / 4096,
    "fp8-block128": 8 + 32 / 128**2,
    "int8-channel": 8 + 32 / 4096,
    "int4-g128": 4 + (16 + 16) / 128,  # 4.25: an fp16 scale and an fp16 zero point
    "int4-g128-sym": 4 + 16 / 128 + 2 * 64 / 4096**2,  # and the int64 shape of the matrix
    "gptq-int4-g128": 4 + (16 + 4) / 128 + 32 / 4096,  # and an int32 group index for each column
    "awq-int4-g128": 4 + (16 + 4) / 128,  # 4.15625
    "nf4": 4 + 32 / 64 + 16 * 32 / 4096**2,
    "nf4-dq": 4 + 8 / 64 + 32 / (64 * 256) + (16 + 256) * 32 / 4096**2,
    "mxfp4": 4 + 8 / 32,
    "nvfp4": 4 + 8 / 16 + 2 * 32 / 4096**2,
}


def shapes(format, matrix):
    return [(tensor.role, tensor.shape[1:], tensor.dtype) for tensor in format.tensors(matrix)]


def test_every_format_has_its_bits_written_beside():
    assert BITS.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", BITS)
def test_bits_of_a_weight_with_its_share_of_everything(name):
    matrix = Matrix(4096, 4096)
    stored = sum(tensor.bytes for tensor in FORMATS[name].tensors(matrix))

    assert 8 * stored / matrix.elements == pytest.approx(BITS[name], abs=1e-12)


# Headers of real layers: the test data of vLLM (AWQ, compressed-tensors, fp8), N = 128 or 256 and K = 256.
def test_awq_as_stored():
    assert shapes(FORMATS["awq-int4-g128"], Matrix(128, 256)) == [
        ("packed", (256, 16), "int32"),
        ("scale", (2, 128), "fp16"),
        ("zero", (2, 16), "int32"),
    ]


def test_gptq_as_stored():
    assert shapes(FORMATS["gptq-int4-g128"], Matrix(128, 256)) == [
        ("packed", (32, 128), "int32"),
        ("scale", (2, 128), "fp16"),
        ("zero", (2, 16), "int32"),
        ("index", (256,), "int32"),
    ]


def test_compressed_tensors_with_zero_points_as_stored():
    fields = {"bits": 4, "word": "int32", "scale": "bf16", "zero": "packed", "scale_block": (1, 128)}

    assert shapes(format_of(fields), Matrix(256, 256)) == [
        ("packed", (256, 32), "int32"),
        ("scale", (256, 2), "bf16"),
        ("zero", (32, 2), "int32"),
    ]


def test_fp8_as_stored():
    assert shapes(FORMATS["fp8-channel"], Matrix(256, 256)) == [
        ("packed", (256, 256), "fp8_e4m3fn"),
        ("scale", (256, 1), "fp32"),
    ]
    assert shapes(FORMATS["fp8-block128"], Matrix(256, 256)) == [
        ("packed", (256, 256), "fp8_e4m3fn"),
        ("scale", (2, 2), "fp32"),
    ]


def test_mxfp4_as_gpt_oss_stores_it():
    # gate_up_proj_blocks [32, 5760, 90, 16] and gate_up_proj_scales [32, 5760, 90] of openai/gpt-oss-20b
    packed, scale = FORMATS["mxfp4"].tensors(Matrix(5760, 2880, 32))

    assert packed.bytes == 32 * 5760 * 90 * 16
    assert scale.bytes == 32 * 5760 * 90


def test_blocks_that_do_not_divide_are_whole_ones():
    # 576 rows of 7168: ceil(576 / 128) = 5 blocks down, 56 across (kv_a_proj of DeepSeek-V3)
    assert shapes(FORMATS["fp8-block128"], Matrix(576, 7168))[1] == ("scale", (5, 56), "fp32")


def test_stacked_matrices_are_stored_one_by_one():
    one, many = (sum(t.bytes for t in FORMATS["nf4"].tensors(Matrix(33, 65, count))) for count in (1, 8))

    assert many == 8 * one


sizes = st.integers(1, 400)


@given(st.sampled_from(sorted(FORMATS)), sizes, sizes, st.integers(1, 5))
def test_no_weight_is_lost_and_padding_stays_within_a_word_a_line(name, rows, columns, count):
    format, matrix = FORMATS[name], Matrix(rows, columns, count)
    packed = 8 * next(t.bytes for t in format.tensors(matrix) if t.role == "packed")
    line = DTYPE_BITS[format.word] * max(rows, columns)

    assert matrix.elements * format.bits <= packed <= matrix.elements * format.bits + count * line


def test_tensors_know_their_bytes():
    assert StoredTensor("scale", (2, 3), "fp16").bytes == 12


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"bits": 4, "group": 128}, "unknown field 'group' of a format"),
        ({"bits": 8, "element": "fp7"}, "unknown dtype 'fp7' of a format"),
        ({"bits": 4, "scale": "fp16"}, "a scale and a block for it, or neither"),
        ({"bits": 4, "scale_block": (1, 128)}, "a scale and a block for it, or neither"),
        ({"bits": 4, "extra": {"float": 1}}, "unknown dtype 'float' of a format"),
    ],
)
def test_a_damaged_row_is_refused(row, message):
    with pytest.raises(ValueError, match=message):
        format_of(row)


def test_every_built_in_format_says_what_it_is_and_where_from():
    for name, format in FORMATS.items():
        assert format.about
        assert format.source.startswith("https://") or name == "bf16"
        assert format.compute in (None, "fp8", "int8", "fp4")


def test_recipes_say_what_is_multiplied_in_what():
    for recipe in load_recipes():
        assert recipe["products"]
        assert recipe["format"] in (*FORMATS, "any")


def test_a_format_is_a_value():
    assert format_of({"bits": 16, "element": "bf16"}) == Format(bits=16, element="bf16")
