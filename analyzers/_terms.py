"""Cost terms read off traces: a quantity measured at a few points and solved for its coefficients.

A decode step of B sequences with c cached tokens each costs constant + B*(per_sequence + per_cached_token*c) beyond
every window; a prefill of one prompt of s tokens per_sequence + per_prompt_token*s + per_prompt_token_squared*s^2.
Arithmetic is exact (fractions), so a coefficient that is an integer comes out as one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from introspect.table import Value

COLUMNS = {
    "quantity": "",
    "unit": "",
    "constant": "",
    "per_sequence": "",
    "per_cached_token": "",
    "per_prompt_token": "",
    "per_prompt_token_squared": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Where decode is measured: `near` with one and two sequences, then two contexts beyond every window."""

    near: int
    far: int
    farther: int


def decode_terms(measure: Callable[[int, int], int], points: Points) -> dict[str, Value]:
    """Coefficients of a quantity `measure(batch, context)` of decode."""
    one, two = measure(1, points.near), measure(2, points.near)
    constant = 2 * one - two
    far, farther = measure(1, points.far), measure(1, points.farther)
    slope = Fraction(farther - far, points.farther - points.far)
    return {
        "constant": constant,
        "per_sequence": _plain(farther - constant - slope * points.farther),
        "per_cached_token": _plain(slope),
        "per_prompt_token": 0,
        "per_prompt_token_squared": 0,
    }


def prefill_terms(measure: Callable[[int], int], lengths: tuple[int, int, int]) -> dict[str, Value]:
    """Coefficients of a quantity `measure(length)` of a prefill, through three lengths."""
    a, b, c = lengths
    at_a, at_b, at_c = (measure(length) for length in lengths)
    first, second = Fraction(at_b - at_a, b - a), Fraction(at_c - at_b, c - b)
    square = (second - first) / (c - a)
    linear = first - square * (a + b)
    return {
        "constant": 0,
        "per_sequence": _plain(at_a - linear * a - square * a * a),
        "per_cached_token": 0,
        "per_prompt_token": _plain(linear),
        "per_prompt_token_squared": _plain(square),
    }


def _plain(value: Fraction | int) -> int | float:
    exact = Fraction(value)
    return exact.numerator if exact.denominator == 1 else float(exact)
