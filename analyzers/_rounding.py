"""Rounding-error theory: bounds that no correct computation passes, and the typical error for random data.

u is the unit roundoff of the format that rounds. One rounding to nearest has a relative error uniform in +-u/s for a
significand s in [1, 2); with log-uniform s its root mean square is RMS_ROUNDING * u. Typical errors add such errors as
independent (Higham and Mary 2019); bounds are Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., chapter
4, and for sums of any length Jeannerod and Rump 2013.
"""

from __future__ import annotations

import math
from itertools import pairwise

RMS_ROUNDING = math.sqrt(1 / (8 * math.log(2)))
"""sqrt(E[1/s^2] / 3) with E[1/s^2] = 3 / (8 ln 2) for log-uniform s in [1, 2): 0.425."""

FP32_ROUNDOFF = 2.0**-24


def normal_cdf(x: float) -> float:
    """P(z <= x) of a standard normal z."""
    return math.erfc(-x / math.sqrt(2)) / 2


def normal_density(x: float) -> float:
    """Density of a standard normal at x."""
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def sum_bound(terms: int, roundoff: float) -> float:
    """Error of a sum in any order over the sum of |terms|: (k - 1) u (Jeannerod and Rump 2013)."""
    return (terms - 1) * roundoff


def dot_bound(terms: int, roundoff: float) -> float:
    """Error of an inner product in any order over the sum of |a b|: k u (Jeannerod and Rump 2013)."""
    return terms * roundoff


def pairwise_bound(terms: int, roundoff: float) -> float:
    """Error of a sum by halves over the sum of |terms|: t u / (1 - t u), t = log2 k (Higham 2002, 4.2)."""
    depth = math.log2(terms) * roundoff
    return depth / (1 - depth)


def typical_positive_sum(terms: int, roundoff: float, mean_over_largest: float) -> float:
    """Relative error of adding k positive numbers in order.

    Partial sums grow linearly, so the rounding errors add up to RMS_ROUNDING u sqrt(k/3); but at a sum of largest / u
    every further term is swallowed, and all the rest is missing.
    """
    reached = min(1.0, 1 / (roundoff * terms * mean_over_largest))
    walk = RMS_ROUNDING * roundoff * math.sqrt(terms * reached / 3)
    return max(walk * reached, 1 - reached)


def typical_pairwise_sum(roundoff: float) -> float:
    """Relative error of adding positive numbers by halves: the last level counts 1, the one before 1/2, in all 2."""
    return RMS_ROUNDING * roundoff * math.sqrt(2)


def typical_dot(terms: int, roundoff: float, rounded_products: bool) -> float:
    """Error of adding k zero-mean products in order, over the root mean square of the result.

    Partial sums grow as sqrt(i): k^2/2 in all, over k. Products that are rounded too add one more each. An upper
    estimate where the terms have few bits (bf16 products in fp32: about half of it): many additions are then exact.
    """
    return RMS_ROUNDING * roundoff * math.sqrt(terms / 2 + rounded_products)


def grid_error(magnitudes: tuple[float, ...], scale: float) -> float:
    """Root mean square error of a standard normal rounded to the nearest of +-scale * magnitudes (ascending, from 0).

    The exact integral of (x - q)^2 over the cell of each grid value q, twice for both signs; values beyond the largest
    magnitude do not occur, since the scale comes from the largest value of a block.
    """
    grid = [scale * value for value in magnitudes]
    edges = [0.0, *((low + high) / 2 for low, high in pairwise(grid)), grid[-1]]
    cells = zip(grid, pairwise(edges), strict=True)
    return math.sqrt(2 * sum(_cell_error(q, low, high) for q, (low, high) in cells))


def _cell_error(q: float, low: float, high: float) -> float:
    """Integral of (x - q)^2 times the standard normal density from low to high."""
    mass = normal_cdf(high) - normal_cdf(low)
    density_low, density_high = normal_density(low), normal_density(high)
    return (1 + q * q) * mass - (high * density_high - low * density_low) + 2 * q * (density_high - density_low)
