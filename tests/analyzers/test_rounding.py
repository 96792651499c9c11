"""The building blocks of _rounding.py against integrals done numerically, and by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from introspect.analyzers import _rounding as rounding


def integral(f, low, high, steps=20_000):
    width = (high - low) / steps
    return width * sum(f(low + (i + 0.5) * width) for i in range(steps))


def test_the_size_of_one_rounding_error():
    """E[U^2 / s^2] for U uniform in [-1, 1] and s log-uniform in [1, 2): density 1 / (s ln 2)."""
    mean_square = integral(lambda s: 1 / s**2 / (s * math.log(2)), 1, 2) / 3

    assert mean_square == pytest.approx(rounding.RMS_ROUNDING**2, rel=1e-6)


@given(st.floats(-6, 6))
def test_the_normal_distribution(x):
    assert rounding.normal_cdf(x) + rounding.normal_cdf(-x) == pytest.approx(1)
    slope = (rounding.normal_cdf(x + 1e-4) - rounding.normal_cdf(x - 1e-4)) / 2e-4
    assert rounding.normal_density(x) == pytest.approx(slope, abs=1e-6)


def test_bounds_by_hand():
    u = 2.0**-8

    assert rounding.sum_bound(5, u) == 4 * u
    assert rounding.dot_bound(5, u) == 5 * u
    assert rounding.pairwise_bound(1024, u) == 10 * u / (1 - 10 * u)


@pytest.mark.parametrize(
    ("terms", "reached"),
    [(512, 1.0), (1024, 0.5), (4096, 0.125)],  # bf16, mean 1/2, largest 1: the sum stops at 256
)
def test_a_positive_sum_stops_where_its_roundoff_passes_the_terms(terms, reached):
    walk = rounding.RMS_ROUNDING * 2.0**-8 * math.sqrt(512 / 3)

    assert rounding.typical_positive_sum(terms, 2.0**-8, 0.5) == pytest.approx(max(1 - reached, walk * reached))


def test_errors_of_a_growing_sum_add_as_squares():
    """Sum of i^2 for partial sums i, over k^2: k / 3."""
    k = 10_000
    growth = math.sqrt(sum(i * i for i in range(1, k + 1))) / k

    assert rounding.typical_positive_sum(k, 2.0**-24, 0.5) == pytest.approx(
        rounding.RMS_ROUNDING * 2.0**-24 * growth, rel=1e-3
    )


def test_errors_of_a_wandering_sum_add_as_squares():
    """Sum of the variances i of the partial sums, over the variance k of the result: k / 2; products add one each."""
    k = 10_000
    growth = math.sqrt(sum(range(1, k + 1)) / k)

    assert rounding.typical_dot(k, 1.0, rounded_products=False) == pytest.approx(
        rounding.RMS_ROUNDING * growth, rel=1e-3
    )
    assert rounding.typical_dot(2, 1.0, rounded_products=True) == pytest.approx(rounding.RMS_ROUNDING * math.sqrt(2))


@pytest.mark.parametrize("scale", [0.01, 0.3, 1.0, 5.0])
def test_a_grid_error_is_the_integral_over_its_cells(scale):
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

    def error(x):
        nearest = min(magnitudes, key=lambda value: abs(value * scale - x)) * scale
        return (x - nearest) ** 2 * rounding.normal_density(x)

    expected = math.sqrt(2 * integral(error, 0, 6 * scale))
    assert rounding.grid_error(magnitudes, scale) == pytest.approx(expected, rel=1e-4)


def test_a_fine_grid_has_the_error_of_a_uniform_step():
    """Step 1/100: step / sqrt(12)."""
    assert rounding.grid_error(tuple(range(600)), 0.01) == pytest.approx(0.01 / math.sqrt(12), rel=1e-3)
