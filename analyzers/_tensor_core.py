"""What the 14-bit accumulation that DeepSeek-V3's report describes loses: a bound, and the typical loss for fp8 data.

Each group of 32 products and the running sum are cut to multiples of a unit, 2^-13 of the power of two below the
largest of them. fp8 products have few bits themselves, so the typical loss follows from their exact distribution.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import NormalDist

from introspect.analyzers._rounding import FP32_ROUNDOFF, normal_cdf
from introspect.numerics_record import PROMOTION_INTERVAL, TENSOR_CORE_BITS, TENSOR_CORE_GROUP

_LAST_BIT = 2.0 ** (1 - TENSOR_CORE_BITS)  # relative to the leading bit
_CUTS_PER_TERM = (TENSOR_CORE_GROUP + 2) / TENSOR_CORE_GROUP  # the products, the running sum, the result
_QUANTILES = 16  # of the running sum's distribution


def tensor_core_bound(terms: int, promoted: bool) -> float:
    """Error over the sum of |products|: a whole unit for each cut. With promotion the 14-bit part stays at 128 terms
    and fp32 adds the blocks."""
    if not promoted:
        return terms * _CUTS_PER_TERM * _LAST_BIT
    blocks = -(-terms // PROMOTION_INTERVAL)
    return min(terms, PROMOTION_INTERVAL) * _CUTS_PER_TERM * _LAST_BIT + blocks * FP32_ROUNDOFF


@dataclass(frozen=True, slots=True)
class Products:
    """Distribution of |a b| for factors rounded to one format: `weights` maps each magnitude to its probability."""

    weights: dict[float, float]
    known: dict[float, tuple[float, float]] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """Mean of |a b|."""
        return sum(value * weight for value, weight in self.weights.items())

    @property
    def typical_largest(self) -> float:
        """Median of the largest of a group: the value that a share 0.5^(1/32) of the products does not pass."""
        reached = 0.0
        for value in sorted(self.weights):
            reached += self.weights[value]
            if reached >= 0.5 ** (1 / TENSOR_CORE_GROUP):
                break
        return value

    def cut(self, unit: float) -> tuple[float, float]:
        """Mean and mean square of what cutting |a b| to multiples of `unit` removes."""
        if unit not in self.known:
            removed = [(value % unit, weight) for value, weight in self.weights.items()]
            self.known[unit] = sum(r * w for r, w in removed), sum(r * r * w for r, w in removed)
        return self.known[unit]


def products(magnitudes: tuple[float, ...], share_below: Callable[[float], float]) -> Products:
    """Products of two factors whose |x| lies below x with probability `share_below(x)`, rounded to the format."""
    edges = [0.0, *((low + high) / 2 for low, high in pairwise(magnitudes)), math.inf]
    shares = [share_below(high) - share_below(low) for low, high in pairwise(edges)]
    factors = [(value, share) for value, share in zip(magnitudes, shares, strict=True) if share > 0]
    weights: defaultdict[float, float] = defaultdict(float)
    for a, share_a in factors:
        for b, share_b in factors:
            weights[a * b] += share_a * share_b
    return Products(dict(weights))


def uniform_share_below(x: float) -> float:
    """Of a uniform number in [0, 1)."""
    return min(x, 1.0)


def normal_share_below(x: float) -> float:
    """Of the magnitude of a standard normal number."""
    return 2 * normal_cdf(x) - 1


def typical_positive_sum(terms: int, factors: Products, promoted: bool) -> float:
    """Relative error of a sum of positive products: group by group, the running sum gains what the cut leaves, and
    where it passes a power of two the cut of the result takes half of the bits that fell below its last one."""
    largest, mean = factors.typical_largest, factors.mean
    total, running = 0.0, 0.0
    for group in range(terms // TENSOR_CORE_GROUP):
        if promoted and group % (PROMOTION_INTERVAL // TENSOR_CORE_GROUP) == 0:
            total, running = total + running, 0.0
        unit = _unit(max(running, largest))
        running += TENSOR_CORE_GROUP * (mean - factors.cut(unit)[0])
        grown = _unit(max(running, largest))
        if factors.cut(grown)[0] > 0:
            running -= (grown - unit) / 2
    return 1 - (total + running) / (terms * mean)


def typical_dot(terms: int, factors: Products, promoted: bool) -> float:
    """Error of a sum of zero-mean products over the root mean square of the sum.

    The running sum after i unit-variance products is normal with variance i; what is cut from each product has a random
    sign, so squares add up.
    """
    interval = min(terms, PROMOTION_INTERVAL) if promoted else terms
    largest, squares = factors.typical_largest, 0.0
    for done in range(0, interval, TENSOR_CORE_GROUP):
        for quantile in range(_QUANTILES):
            running = math.sqrt(done) * _half_normal_quantile((quantile + 0.5) / _QUANTILES)
            _, square = factors.cut(_unit(max(running, largest)))
            squares += TENSOR_CORE_GROUP * square / _QUANTILES
    return math.sqrt(squares / interval)


def _half_normal_quantile(share: float) -> float:
    return NormalDist().inv_cdf((1 + share) / 2)


def _unit(largest: float) -> float:
    """The last kept bit of numbers aligned to `largest`."""
    return 2.0 ** math.floor(math.log2(largest)) * _LAST_BIT
