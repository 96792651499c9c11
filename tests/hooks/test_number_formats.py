"""Formats read off bits, against two other sources: torch.finfo and ml_dtypes; rounding against their casts."""

from fnmatch import filter as matching

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from introspect.hooks.number_formats import TORCH_DTYPES, number_formats, round_to, round_to_grid

FORMATS = {entry.name: entry for entry in number_formats()}

ML_DTYPES = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp32": np.float32,
    "fp64": np.float64,
    "fp8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp8fnuz_e4m3": ml_dtypes.float8_e4m3fnuz,
    "fp8fnuz_e5m2": ml_dtypes.float8_e5m2fnuz,
    "fp8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
}


@pytest.mark.parametrize("name", ML_DTYPES)
def test_properties_are_those_of_ml_dtypes(name):
    entry, info = FORMATS[name], ml_dtypes.finfo(ML_DTYPES[name])

    assert (entry.bits, entry.exponent_bits, entry.mantissa_bits) == (info.bits, info.nexp, info.nmant)
    assert (entry.max, entry.epsilon, entry.min_normal) == (
        float(info.max),
        float(info.eps),
        float(info.smallest_normal),
    )
    subnormal = float(info.smallest_subnormal)
    assert entry.min_subnormal == (subnormal if subnormal < entry.min_normal else None)


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_properties_are_those_of_torch(name):
    entry, info = FORMATS[name], torch.finfo(TORCH_DTYPES[name])

    assert (entry.bits, entry.max, entry.min_normal) == (info.bits, info.max, info.tiny)
    if name != "fp8fnuz_e5m2":
        assert entry.epsilon == info.eps


def test_torch_is_wrong_about_one_epsilon():
    """With two mantissa bits the number after 1 is 1.25; torch says 1.125, which e5m2fnuz cannot hold."""
    one, after = torch.tensor([1.0, 1.25]).to(torch.float8_e5m2fnuz).view(torch.uint8).tolist()

    assert after - one == 1
    assert FORMATS["fp8fnuz_e5m2"].epsilon == 0.25
    assert torch.finfo(torch.float8_e5m2fnuz).eps == 0.125


@pytest.mark.parametrize(
    ("name", "bits", "exponent_bits", "mantissa_bits", "largest", "min_normal"),
    [
        # largest: (2 - 2^-10) 2^127; 2^(1-127)
        ("tf32", 19, 8, 10, (2 - 2.0**-10) * 2.0**127, 2.0**-126),
        # all ones but the NaN: 1.75 * 2^8; 2^(1-7)
        ("fp8_e4m3fn", 8, 4, 3, 448, 2.0**-6),
        # 1.75 * 2^15, the exponent above is for infinity; 2^(1-15)
        ("fp8_e5m2", 8, 5, 2, 57344, 2.0**-14),
        # 1.5 * 2^2; 2^(1-1)
        ("fp4_e2m1", 4, 2, 1, 6, 1),
    ],
)
def test_properties_by_hand(name, bits, exponent_bits, mantissa_bits, largest, min_normal):
    entry = FORMATS[name]

    assert (entry.bits, entry.exponent_bits, entry.mantissa_bits) == (bits, exponent_bits, mantissa_bits)
    assert (entry.max, entry.min_normal) == (largest, min_normal)


@pytest.mark.parametrize(
    ("name", "has_inf", "has_nan"),
    [
        ("fp16", True, True),
        ("fp8_e5m2", True, True),
        ("fp8_e4m3fn", False, True),
        ("fp8fnuz_e4m3", False, True),
        ("fp8fnuz_e5m2", False, True),
        ("fp8_e8m0fnu", False, True),
        ("fp6_e3m2", False, False),
        ("fp4_e2m1", False, False),
        ("int8", False, False),
    ],
)
def test_what_is_no_number(name, has_inf, has_nan):
    assert (FORMATS[name].has_inf, FORMATS[name].has_nan) == (has_inf, has_nan)


@pytest.mark.parametrize(
    ("name", "low", "high"), [("int8", -128, 127), ("uint8", 0, 255), ("int4", -8, 7), ("uint4", 0, 15)]
)
def test_integers_have_a_range_and_no_epsilon(name, low, high):
    entry = FORMATS[name]

    assert (entry.min, entry.max) == (low, high)
    assert entry.epsilon is entry.unit_roundoff is entry.min_normal is entry.min_subnormal is None
    assert entry.exponent_bits is entry.mantissa_bits is None


def test_short_patterns_name_one_format_each():
    assert matching(FORMATS, "fp8_e4m3*") == ["fp8_e4m3fn"]
    assert matching(FORMATS, "fp8_e5m2*") == ["fp8_e5m2"]
    assert len(FORMATS) == len(number_formats())


def test_magnitudes_of_the_smallest_format():
    assert FORMATS["fp4_e2m1"].magnitudes == (0, 0.5, 1, 1.5, 2, 3, 4, 6)


@given(st.lists(st.floats(2.0**-100, 2.0**100, width=32), min_size=1))
def test_tf32_rounds_to_the_nearest_of_ten_mantissa_bits(values):
    positive = torch.tensor(values, dtype=torch.float32)
    x = torch.cat([positive, -positive])
    rounded = round_to(x, "tf32")

    assert torch.equal(rounded.view(torch.int32) & 0x1FFF, torch.zeros(len(x), dtype=torch.int32))
    mantissa, exponent = torch.frexp(x.double())  # 11 significant bits, ties to even
    assert torch.equal(rounded.double(), torch.ldexp((mantissa * 2**11).round(), exponent - 11))


@pytest.mark.parametrize("name", ["fp8_e4m3fn", "fp8_e5m2", "fp8fnuz_e4m3", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1"])
@given(share=st.lists(st.floats(-1, 1, width=32), min_size=1))
def test_the_grid_rounds_as_a_cast_does(name, share):
    entry = FORMATS[name]
    x = torch.tensor(share, dtype=torch.float32) * entry.max
    rounded = round_to_grid(x, torch.tensor(entry.magnitudes))

    assert torch.equal(rounded, torch.from_numpy(x.numpy().astype(ML_DTYPES[name]).astype(np.float32)))


@given(st.lists(st.floats(-127, 127, width=32), min_size=1))
def test_the_integer_grid_rounds_half_to_even(values):
    x = torch.tensor(values, dtype=torch.float32)

    assert torch.equal(round_to_grid(x, torch.tensor(FORMATS["int8"].magnitudes)), x.round())


def test_the_grid_saturates():
    assert round_to_grid(torch.tensor([9.0, -7.0]), torch.tensor([0.0, 1.0, 6.0])).tolist() == [6, -6]
