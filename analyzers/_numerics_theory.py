"""The theoretical line beside each measured point of `numerics`: what is expected, and what cannot be passed.

Each function takes one point and the record it belongs to; None where theory gives no figure. Derivations are in
docs/numerics.md; the building blocks are in _rounding.py and _tensor_core.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from introspect import numerics_record as setup
from introspect.analyzers import _rounding as rounding
from introspect.analyzers import _tensor_core as tensor_core
from introspect.numerics_record import Measurement, NumericsRecord

Line = tuple[float | None, float | None]
"""(expected, bound)"""


@dataclass(frozen=True, slots=True)
class Theory:
    """The lines for the points of one record, with the product distributions that several of them share."""

    record: NumericsRecord
    _products: dict[str, tensor_core.Products] = field(default_factory=dict)

    def line(self, point: Measurement) -> Line:
        """(expected, bound) beside this point."""
        return _LINES[point.experiment](self, point)

    def roundoff(self, format: str) -> float:
        """Unit roundoff of a floating-point format."""
        roundoff = self.record.format(format).unit_roundoff
        assert roundoff is not None, f"{format} has no unit roundoff"
        return roundoff

    def products(self, kind: str, share_below: Callable[[float], float]) -> tensor_core.Products:
        """Products of two fp8_e4m3fn numbers of this distribution."""
        if kind not in self._products:
            magnitudes = self.record.format("fp8_e4m3fn").magnitudes
            self._products[kind] = tensor_core.products(magnitudes, share_below)
        return self._products[kind]


def _swallowed_update(theory: Theory, point: Measurement) -> Line:
    """1 + u is a tie between 1 and the next number, and ties go to the even 1."""
    roundoff = theory.roundoff(point.format)
    return roundoff, roundoff


def _update_drift(theory: Theory, point: Measurement) -> Line:
    """n equal updates; rounded to nearest, one below the roundoff of 1 never moves the weight."""
    swallowed = point.method == "nearest even" and theory.roundoff(point.format) >= setup.WEIGHT_UPDATE
    return 0.0 if swallowed else _at(point) * setup.WEIGHT_UPDATE, None


def _exp_overflow(theory: Theory, point: Measurement) -> Line:
    """The logarithm of the smallest magnitude that rounds to infinity; numbers x are one spacing apart."""
    entry = theory.record.format(point.format)
    threshold = math.log(entry.overflow_threshold)
    spacing = 2 * theory.roundoff(point.format) * 2.0 ** math.floor(math.log2(threshold))
    return threshold, threshold + spacing


def _softmax_sum(theory: Theory, point: Measurement) -> Line:
    """1; but 0 once the sum of the exponentials is infinite, and not a number once each of them is."""
    threshold = theory.record.format(point.format).overflow_threshold
    power = math.exp(0.0 if point.method == "max subtracted" else _at(point))
    if power >= threshold:
        return None, None
    return float(setup.SOFTMAX_WIDTH * power < threshold), None


def _sum_error(theory: Theory, point: Measurement) -> Line:
    terms, roundoff = int(_at(point)), theory.roundoff(point.format)
    if point.method == "in order":
        return rounding.typical_positive_sum(terms, roundoff, 0.5), rounding.sum_bound(terms, roundoff)
    if point.method == "pairwise":
        return rounding.typical_pairwise_sum(roundoff), rounding.pairwise_bound(terms, roundoff)
    promoted = setup.TENSOR_CORE_METHODS[point.method]
    factors = theory.products("uniform", tensor_core.uniform_share_below)
    return (
        tensor_core.typical_positive_sum(terms, factors, promoted),
        tensor_core.tensor_core_bound(terms, promoted),
    )


def _gemm_error(theory: Theory, point: Measurement) -> Line:
    """Both lines in units of the product's root mean square, so a bound is multiplied by the measured condition."""
    terms = int(_at(point))
    if point.method == "operands rounded":
        roundoff = theory.roundoff(point.format)
        expected, bound = rounding.RMS_ROUNDING * roundoff * math.sqrt(2), 2 * roundoff + roundoff**2
    elif point.method in setup.TENSOR_CORE_METHODS:
        promoted = setup.TENSOR_CORE_METHODS[point.method]
        factors = theory.products("normal", tensor_core.normal_share_below)
        expected = tensor_core.typical_dot(terms, factors, promoted)
        bound = tensor_core.tensor_core_bound(terms, promoted)
    else:
        accumulator = point.method.split()[0]
        roundoff = theory.roundoff(accumulator)
        # A product of two bf16 numbers fits into fp32, not into bf16.
        expected = rounding.typical_dot(terms, roundoff, rounded_products=accumulator == point.format)
        bound = rounding.dot_bound(terms, roundoff)
    return expected, bound * point.condition


def _loss_scale(theory: Theory, point: Measurement) -> Line:
    """Shares of a log-normal distribution beyond half the smallest subnormal (a tie goes to 0), or past the largest."""
    entry = theory.record.format(point.format)
    assert entry.min_subnormal is not None, f"{point.format} has no subnormal"
    lost = point.method == "lost to zero"
    edge = math.log2(entry.min_subnormal / 2 if lost else entry.overflow_threshold)
    deviations = (edge - _at(point) - setup.GRADIENT_LOG2_MEAN) / setup.GRADIENT_LOG2_DEVIATION
    return rounding.normal_cdf(deviations if lost else -deviations), None


def _variance(theory: Theory, point: Measurement) -> Line:
    """Bounds to first order: Chan, Golub and LeVeque 1983, with condition sqrt(1 + (mean/deviation)^2)."""
    u, n, ratio = theory.roundoff(point.format), setup.VARIANCE_WIDTH, _at(point)
    typical, condition = rounding.RMS_ROUNDING * u, math.sqrt(1 + ratio**2)
    mean_error = 3 * (typical * ratio) ** 2  # square of the mean's error: a sum by halves counts 2, its division 1
    if point.method == "one pass":
        expected = typical * math.sqrt(13 * ratio**4 + 3 * condition**4 + 1)
        return expected, n * u * condition**2
    if point.method == "two passes":
        return math.sqrt(3 * typical**2 + 3 * mean_error**2), n * u + (n * u * condition) ** 2
    return typical * math.sqrt(n / 3 + 2 / 3 * ratio**2), n * u * condition


def _quantisation(theory: Theory, point: Measurement) -> Line:
    """The mean square over the scales that the elements met; at most half the widest gap of the largest scale."""
    magnitudes = theory.record.format(point.format).magnitudes
    errors = {scale: rounding.grid_error(magnitudes, scale) for scale in set(point.scales)}
    expected = math.sqrt(sum(errors[scale] ** 2 for scale in point.scales) / len(point.scales))
    widest = max(high - low for low, high in pairwise(magnitudes))
    assert point.largest_scale is not None, "a quantisation without scales"
    return expected, point.largest_scale * widest / 2


def _at(point: Measurement) -> float:
    assert point.at is not None, f"{point.experiment} is measured at no point"
    return point.at


_LINES: dict[str, Callable[[Theory, Measurement], Line]] = {
    "swallowed_update": _swallowed_update,
    "update_drift": _update_drift,
    "exp_overflow": _exp_overflow,
    "softmax_sum": _softmax_sum,
    "sum_error": _sum_error,
    "gemm_error": _gemm_error,
    "loss_scale": _loss_scale,
    "variance": _variance,
    "quantisation": _quantisation,
}


def fp16_exp_overflow(record: NumericsRecord) -> float:
    """ln of the largest fp16 number: the exponential of anything larger passes the format's range."""
    return math.log(record.format("fp16").max)
