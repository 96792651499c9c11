"""Find the expression in config fields that gives a dimension, from sizes observed under changed fields.

An expression is a sum of terms, each a whole number times fields and a quotient ("a // b": a width that a class divides
among heads; "a * b // c"). It is never looked up: it must give every observed size, that of the unchanged config first.
Two routes: the multilinear form through all combinations of the fields' first changes, and, where no such form fits,
the shortest sum of products (squares and quotients among them) whose coefficients solve the fitted observations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, combinations_with_replacement

import torch

from introspect.explain_record import Term

Terms = tuple[Term, ...]
QUOTIENT = " // "
TIMES = " * "  # in the numerator of a quotient
MOST_TERMS = 3
MOST_FACTORS = 3
LARGEST_COUNT = 32  # coefficient of a product in a fitted sum; larger ones are widths that no field holds
NEAR = 1e-10  # residual, relative to the sizes, of a sum that is then checked exactly
NEAR_WHOLE = 1e-4


@dataclass(frozen=True, slots=True)
class Seen:
    """The size of one dimension under the given values of the fields that might decide it."""

    values: dict[str, int]
    size: int


def evaluate(terms: Terms, values: dict[str, int]) -> int:
    """What the terms sum up to."""
    total = 0
    for coefficient, factors in terms:
        part = coefficient
        for factor in factors:
            part *= _value(factor, values)
        total += part
    return total


def names_in(factor: str) -> list[str]:
    """The fields of a factor: one, or those of a quotient."""
    return [name for side in factor.split(QUOTIENT) for name in side.split(TIMES)]


def _value(factor: str, values: dict[str, int]) -> int:
    over, _, under = factor.partition(QUOTIENT)
    numerator = math.prod(values[name] for name in over.split(TIMES))
    return numerator // values[under] if under else numerator


def holds(terms: Terms, seen: Sequence[Seen]) -> bool:
    """Whether the terms give every one of these sizes."""
    return all(evaluate(terms, one.values) == one.size for one in seen)


def fits(fitted: Sequence[Seen], required: Sequence[str]) -> Iterator[Terms]:
    """Expressions that name all `required` fields and give every fitted size, the likeliest first. `fitted[0]` is the
    model as it is; its other fields (moved only together with another) may be named or not."""
    form = _multilinear(fitted)
    if form is not None and holds(form, fitted):
        yield form
    yield from _sparse(fitted, required)


def _multilinear(fitted: Sequence[Seen]) -> Terms | None:
    """The form linear in each field, if all combinations of two values a field are there and it has whole numbers."""
    names = list(fitted[0].values)
    points = []
    for name, low in fitted[0].values.items():
        high = next((one.values[name] for one in fitted if one.values[name] != low), None)
        if high is None:
            return None
        points.append((low, high))
    corners = {
        tuple(int(one.values[name] != low) for name, (low, _) in zip(names, points, strict=True)): Fraction(one.size)
        for one in fitted
        if all(one.values[name] in ends for name, ends in zip(names, points, strict=True))
    }
    return _terms(_coefficients(corners, points), names) if len(corners) == 2 ** len(names) else None


def _coefficients(
    corners: dict[tuple[int, ...], Fraction], points: list[tuple[int, int]]
) -> dict[tuple[int, ...], Fraction]:
    """Coefficient of each product of fields (1 where one is in it): each field in turn becomes a slope and a start."""
    current = dict(corners)
    for axis, (low, high) in enumerate(points):
        turned: dict[tuple[int, ...], Fraction] = {}
        for corner in current:
            if corner[axis]:
                continue
            other = (*corner[:axis], 1, *corner[axis + 1 :])
            slope = (current[other] - current[corner]) / (high - low)
            turned[corner], turned[other] = current[corner] - slope * low, slope
        current = turned
    return current


def _terms(coefficients: dict[tuple[int, ...], Fraction], names: Sequence[str]) -> Terms | None:
    if any(value.denominator != 1 for value in coefficients.values()):
        return None
    return _ordered(
        (int(value), tuple(name for name, chosen in zip(names, inside, strict=True) if chosen))
        for inside, value in coefficients.items()
        if value
    )


def _ordered(terms: Iterable[Term]) -> Terms:
    """Factors and terms in alphabetical order, a constant last."""
    inner = [(coefficient, tuple(sorted(factors))) for coefficient, factors in terms]
    return tuple(sorted(inner, key=lambda term: (not term[1], term[1])))


def _sparse(fitted: Sequence[Seen], required: Sequence[str]) -> Iterator[Terms]:
    """Sums of few products that give every fitted size; fewer and shorter products first."""
    products = _products(fitted[0].values)
    columns = [[_product(product, one.values) for one in fitted] for product in products]
    sizes = [one.size for one in fitted]
    different = len({tuple(one.values.items()) for one in fitted})
    for count in range(1, min(MOST_TERMS, different - 1) + 1):  # as many unknowns as observations would fit anything
        found = _small_sums(columns, sizes, count)
        for chosen, counts in sorted(found, key=lambda pair: sum(_length(products[i]) for i in pair[0])):
            terms = _ordered(zip(counts, (products[i] for i in chosen), strict=True))
            if _is_plausible(terms, required) and holds(terms, fitted):
                yield terms


def _length(product: tuple[str, ...]) -> int:
    """Factors; a product that is divided counts more than one factor of it that is."""
    return sum(3 if TIMES in factor else 1 for factor in product)


def _is_plausible(terms: Terms, required: Sequence[str]) -> bool:
    """Whether a sum is one that a class would compute: all fields in it, one quotient, nothing but a constant less."""
    factors = {factor for _, product in terms for factor in product}
    named = {name for factor in factors for name in names_in(factor)}
    adds = all(coefficient > 0 for coefficient, product in terms if product)
    return named.issuperset(required) and sum(QUOTIENT in factor for factor in factors) < 2 and adds


def _small_sums(columns: list[list[int]], sizes: list[int], count: int) -> list[tuple[list[int], list[int]]]:
    """Sums of `count` columns, with small whole coefficients, that are the sizes as far as fp64 can tell."""
    if count > len(columns):
        return []
    matrix, wanted = (torch.tensor(rows, dtype=torch.float64) for rows in (columns, sizes))
    lengths = matrix.norm(dim=1)
    matrix, wanted, length = matrix / lengths[:, None], wanted / wanted.norm(), wanted.norm()
    chosen = torch.combinations(torch.arange(len(columns)), count).reshape(-1, count)  # of one column it is a vector
    systems = matrix[chosen].transpose(1, 2)
    goal = wanted.reshape(1, -1, 1).expand(len(chosen), -1, 1)
    solution = torch.linalg.lstsq(systems, goal).solution
    residual = (systems @ solution - goal).abs().amax(dim=(1, 2))
    counts = solution[..., 0] * length / lengths[chosen]
    whole = counts.round()
    small = (whole != 0) & (whole.abs() <= LARGEST_COUNT) & ((counts - whole).abs() < NEAR_WHOLE)
    kept = small.all(dim=1) & (residual < NEAR)
    return list(zip(chosen[kept].tolist(), whole[kept].long().tolist(), strict=True))


def _product(factors: tuple[str, ...], values: dict[str, int]) -> int:
    result = 1
    for factor in factors:
        result *= _value(factor, values)
    return result


def _products(base: dict[str, int]) -> list[tuple[str, ...]]:
    """Products of up to three fields or quotients, one of them squared or not, and the constant. A quotient divides
    evenly in the model as it is, and stands in no product with its own numerator or another quotient."""
    names = list(base)
    over = {**base, **{TIMES.join(sorted(pair)): base[pair[0]] * base[pair[1]] for pair in combinations(names, 2)}}
    quotients = [
        f"{above}{QUOTIENT}{under}"
        for above, size in over.items()
        for under in names
        if under not in above.split(TIMES) and size > base[under] > 1 and size % base[under] == 0
    ]
    found: list[tuple[str, ...]] = [()]
    for count in range(1, MOST_FACTORS + 1):
        for factors in combinations_with_replacement((*names, *quotients), count):
            divided = {factor for factor in factors if QUOTIENT in factor}
            numerators = {name for factor in divided for name in factor.partition(QUOTIENT)[0].split(TIMES)}
            if len(divided) < 2 and not numerators & set(factors) and 3 * len(set(factors)) > count:
                found.append(factors)
    return found
