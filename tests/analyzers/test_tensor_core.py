import math

import pytest

from introspect.analyzers import _tensor_core as tensor_core

HALVES = (0.0, 0.5, 1.0)  # a format of three magnitudes


def test_products_of_uniform_numbers_by_hand():
    """[0, 1) rounds to 0, 1/2, 1 with 1/4, 1/2, 1/4."""
    found = tensor_core.products(HALVES, tensor_core.uniform_share_below)

    assert found.weights == {
        0.0: 1 - 0.75**2,
        0.25: 0.25,
        0.5: 0.25,
        1.0: 0.0625,
    }
    assert found.mean == 0.25  # (1/2)^2


def test_products_of_normal_numbers_have_all_the_probability():
    found = tensor_core.products(HALVES, tensor_core.normal_share_below)

    assert sum(found.weights.values()) == pytest.approx(1)


def test_what_a_cut_removes():
    found = tensor_core.products(HALVES, tensor_core.uniform_share_below)

    assert found.cut(0.25) == (0, 0)  # all are multiples
    assert found.cut(0.5) == (0.25 * 0.25, 0.25 * 0.25**2)  # only 1/4 has a remainder


def test_the_typical_largest_of_a_group():
    """No product above 1/2 in 32 with probability 0.9375^32 = 0.127: the median group has a 1."""
    assert tensor_core.products(HALVES, tensor_core.uniform_share_below).typical_largest == 1.0


def test_bounds_by_hand():
    # 34 cuts for 32 products, 2^-13 each
    assert tensor_core.tensor_core_bound(64, promoted=False) == 68 * 2.0**-13
    # blocks of 128: 136 cuts; 32 additions in fp32
    assert tensor_core.tensor_core_bound(4096, promoted=True) == 136 * 2.0**-13 + 32 * 2.0**-24


def test_sums_of_coarse_products_are_exact_until_the_unit_passes_them():
    """Multiples of 1/4: the unit passes 1/4 at 2^(13 - 2) = 2048, which a mean of 1/4 reaches after 8192 products."""
    factors = tensor_core.products(HALVES, tensor_core.uniform_share_below)

    assert tensor_core.typical_positive_sum(8192, factors, promoted=False) == 0
    assert tensor_core.typical_positive_sum(32768, factors, promoted=False) > 0.01
    assert tensor_core.typical_positive_sum(32768, factors, promoted=True) == 0


def test_promotion_stops_the_growth_of_the_error():
    magnitudes = tuple(i / 256 for i in range(257))
    factors = tensor_core.products(magnitudes, tensor_core.uniform_share_below)
    long, short = (tensor_core.typical_positive_sum(terms, factors, promoted=True) for terms in (16384, 128))

    assert long == pytest.approx(short)
    assert tensor_core.typical_positive_sum(16384, factors, promoted=False) > 100 * short


def test_promotion_stops_the_growth_for_zero_mean_products_too():
    magnitudes = tuple(i / 64 for i in range(257))
    factors = tensor_core.products(magnitudes, tensor_core.normal_share_below)

    assert tensor_core.typical_dot(4096, factors, promoted=True) == tensor_core.typical_dot(
        128, factors, promoted=False
    )
    ratio = tensor_core.typical_dot(16384, factors, promoted=False) / tensor_core.typical_dot(4096, factors, False)
    assert ratio == pytest.approx(math.sqrt(4), rel=0.1)  # fine products: the square root of k
