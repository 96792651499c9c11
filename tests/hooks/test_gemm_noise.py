import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from introspect.hooks.gemm_noise import _in_order, _split, _tiled, _ulp, difference_bound, measure_gemm
from introspect.numerics_record import GEMM_OUTPUT


@pytest.mark.parametrize("dtype", GEMM_OUTPUT)
def test_correct_kernels_stay_inside_the_bound_and_bugs_do_not(dtype):
    noise = measure_gemm(64, 512, 64, dtype, seed=0)

    assert noise.output_dtype == GEMM_OUTPUT[dtype]
    assert all(kernel.worst_over_bound <= 1 for kernel in noise.kernels if kernel.correct)
    bugs = [kernel for kernel in noise.kernels if not kernel.correct]
    assert bugs
    assert all(kernel.worst_over_bound > 1 for kernel in bugs)


def test_the_seed_decides_everything_and_m_and_n_nothing():
    one, other = measure_gemm(8, 96, 8, "bf16", seed=3), measure_gemm(4096, 96, 16384, "bf16", seed=3)

    assert one.kernels == other.kernels


@pytest.mark.parametrize("dtype", GEMM_OUTPUT)
def test_one_term_leaves_no_order_to_choose_and_no_bug_to_plant(dtype):
    noise = measure_gemm(4, 1, 4, dtype, seed=0)

    assert {(kernel.correct, kernel.rms_difference, kernel.worst_over_bound) for kernel in noise.kernels} == {
        (True, 0.0, 0.0)  # also where operands round to zero, and with them the bound
    }


@given(k=st.integers(1, 70), seed=st.integers(0, 1000))
def test_every_order_multiplies_the_same_integers(k, seed):
    a, b = torch.randint(-8, 9, (2, k, 3), generator=torch.Generator().manual_seed(seed)).float()
    exact = a.T @ b

    for kernel in (_in_order, _split, _tiled):
        assert torch.equal(kernel(a, b), exact)


def test_the_bound_by_hand():
    """k = 4, |A||B| = 3, |C| = 2, bf16: 2 * 4 * 2^-24 * 3 + 2 * 2^-8 * (2 + 4 * 2^-24 * 3)."""
    bound = difference_bound(torch.tensor([3.0]).double(), torch.tensor([2.0]).double(), 4, "bf16")

    assert bound.item() == pytest.approx(24 * 2.0**-24 + 2.0**-7 * (2 + 12 * 2.0**-24), rel=1e-12)


def test_a_stored_sum_is_not_rounded_again():
    bound = difference_bound(torch.tensor([3.0]).double(), torch.tensor([2.0]).double(), 4, "fp32")

    assert bound.item() == 24 * 2.0**-24


@pytest.mark.parametrize(("value", "gap"), [(1.0, 2.0**-7), (1.99, 2.0**-7), (-2.0, 2.0**-6), (0.75, 2.0**-8)])
def test_a_unit_in_the_last_place_is_that_of_the_binade(value, gap):
    assert _ulp(torch.tensor([value]).double(), "bf16").item() == gap
