"""Find the expression in config fields that gives a dimension, from sizes observed under changed fields.

An expression is a sum of terms, each a whole number times fields and quotients of two fields ("a // b": a width that a
class divides among heads). It is never looked up: it must give every observed size, that of the unchanged config first.
Two routes: the multilinear form through all combinations of the fields' first changes, and, where no such form fits,
the shortest sum of products (squares and quotients among them) whose coefficients solve the fitted observations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations_with_replacement, permutations

import torch

from introspect.explain_record import Term

Terms = tuple[Term, ...]
QUOTIENT = " // "
MOST_TERMS = 3
MOST_FACTORS = 3
LARGEST_COUNT = 32  # coefficient of a product in a fitted sum; larger ones are widths that no field holds
NEAR = 1e-10  # residual, relative to the sizes, of sums that are then solved exactly


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


def _value(factor: str, values: dict[str, int]) -> int:
    over, _, under = factor.partition(QUOTIENT)
    return values[over] // values[under] if under else values[factor]


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
        found = _near_sums(columns, sizes, count)
        for chosen in sorted(found, key=lambda places: sum(len(products[i]) for i in places)):
            solved = _solve([columns[i] for i in chosen], sizes)
            if solved is not None:
                terms = _ordered(zip(solved, (products[i] for i in chosen), strict=True))
                if _is_plausible(terms, required):
                    yield terms


def _is_plausible(terms: Terms, required: Sequence[str]) -> bool:
    """Whether a sum is one that a class would compute: all fields in it, one quotient, small counts of each product."""
    factors = {factor for _, product in terms for factor in product}
    named = {part for factor in factors for part in factor.split(QUOTIENT)}
    counts = [coefficient for coefficient, product in terms if product or len(terms) > 1]
    small = all(coefficient and abs(coefficient) <= LARGEST_COUNT for coefficient in counts)
    adds = all(coefficient > 0 for coefficient, product in terms if product)
    return named.issuperset(required) and sum(QUOTIENT in factor for factor in factors) < 2 and small and adds


def _near_sums(columns: list[list[int]], sizes: list[int], count: int) -> list[tuple[int, ...]]:
    """Which `count` columns sum to the sizes with some real coefficients, as far as fp64 can tell."""
    if count > len(columns):
        return []
    matrix, wanted = (torch.tensor(rows, dtype=torch.float64) for rows in (columns, sizes))
    matrix, wanted = matrix / matrix.norm(dim=1, keepdim=True), wanted / wanted.norm()
    chosen = torch.combinations(torch.arange(len(columns)), count)
    chosen = chosen.reshape(-1, count)  # of one column it makes a vector
    systems = matrix[chosen].transpose(1, 2)
    goal = wanted.reshape(1, -1, 1).expand(len(chosen), -1, 1)
    residual = (systems @ torch.linalg.lstsq(systems, goal).solution - goal).abs().amax(dim=(1, 2))
    return [tuple(row) for row in chosen[residual < NEAR].tolist()]


def _product(factors: tuple[str, ...], values: dict[str, int]) -> int:
    result = 1
    for factor in factors:
        result *= _value(factor, values)
    return result


def _products(base: dict[str, int]) -> list[tuple[str, ...]]:
    """Products of up to three fields or quotients, one of them squared or not, and the constant. A quotient divides
    evenly in the model as it is, and stands in no product with its own numerator or another quotient."""
    names = list(base)
    quotients = [
        f"{over}{QUOTIENT}{under}"
        for over, under in permutations(names, 2)
        if base[under] > 1 and base[over] > base[under] and base[over] % base[under] == 0
    ]
    found: list[tuple[str, ...]] = [()]
    for count in range(1, MOST_FACTORS + 1):
        for factors in combinations_with_replacement((*names, *quotients), count):
            divided = {factor for factor in factors if QUOTIENT in factor}
            numerators = {factor.partition(QUOTIENT)[0] for factor in divided}
            if len(divided) < 2 and not numerators & set(factors) and 3 * len(set(factors)) > count:
                found.append(factors)
    return found


def _solve(columns: list[list[int]], sizes: list[int]) -> list[int] | None:
    """Whole coefficients with which the columns sum to the sizes; None where there are none, or more than one set."""
    rows = [[Fraction(value) for value in row] for row in zip(*columns, sizes, strict=True)]
    for pivot in range(len(columns)):
        place = next((i for i in range(pivot, len(rows)) if rows[i][pivot]), None)
        if place is None:
            return None
        chosen = rows.pop(place)
        rows.insert(pivot, chosen)
        for row in rows:
            if row is not chosen and row[pivot]:
                factor = row[pivot] / chosen[pivot]
                row[:] = [a - factor * b for a, b in zip(row, chosen, strict=True)]
    if any(row[-1] for row in rows[len(columns) :]):
        return None
    solved = [rows[i][-1] / rows[i][i] for i in range(len(columns))]
    return [int(value) for value in solved] if all(value.denominator == 1 for value in solved) else None
