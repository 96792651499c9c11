import pytest

from introspect.errors import OptionError
from introspect.numerics_record import NumberFormat, NumericsParams


def test_a_product_is_three_sizes():
    assert NumericsParams(gemm="4096,14336,8").gemm_shape == (4096, 14336, 8)
    assert NumericsParams().gemm_shape is None


@pytest.mark.parametrize(
    "text", ["", "4096", "1,2", "1,2,3,4", "0,1,1", "-1,2,3", "a,b,c", "1,2,", "1,2.5,3", "1,262145,1"]
)
def test_anything_else_is_refused_before_anything_is_measured(text):
    with pytest.raises(OptionError) as error:
        NumericsParams(gemm=text)

    assert str(error.value) == f"--gemm: got {text!r}, expected M,K,N: three integers from 1, K up to 262144"


def test_operands_without_a_product_are_refused_not_ignored():
    with pytest.raises(OptionError) as error:
        NumericsParams(dtype="fp16")

    assert str(error.value) == (
        "--dtype: got 'fp16', expected --gemm M,K,N beside it: it names the operands of that product"
    )


def test_a_product_is_of_bf16_unless_said_otherwise():
    assert NumericsParams(gemm="1,1,1").gemm_dtype == "bf16"
    assert NumericsParams(gemm="1,1,1", dtype="fp32").gemm_dtype == "fp32"


@pytest.mark.parametrize(
    ("largest", "epsilon", "threshold"),
    [
        (65504.0, 2.0**-10, 65520.0),  # 65504 + half of 2^15 * 2^-10
        (448.0, 2.0**-3, 464.0),  # 448 + half of 2^8 * 2^-3
        (127.0, None, 127.5),  # integers are 1 apart
    ],
)
def test_overflow_begins_half_a_unit_above_the_largest_number(largest, epsilon, threshold):
    entry = NumberFormat(
        name="f",
        bits=8,
        exponent_bits=None,
        mantissa_bits=None,
        min=-largest,
        max=largest,
        min_normal=None,
        min_subnormal=None,
        epsilon=epsilon,
        has_inf=False,
        has_nan=False,
        magnitudes=(),
        defined_by="test",
    )

    assert entry.overflow_threshold == threshold
    assert entry.unit_roundoff == (None if epsilon is None else epsilon / 2)
