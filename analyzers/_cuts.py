"""Sizes of one rank's part: of a weight, of a product with it, of an attention call; and which degrees are possible."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from introspect.analyzers._products import Product
from introspect.records import ExpertCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A size and this rank's part of it, padding included. `shared`: how much of the part other ranks hold as well."""

    whole: int
    part: int
    shared: int = 0

    def of(self, size: int) -> int:
        """The part of a size that the cut runs through: itself, or a multiple that is laid out around it."""
        return size // self.whole * self.part if size % self.whole == 0 else size


def even(size: int, ranks: int) -> Cut:
    """Equal parts; the last one padded."""
    return Cut(whole=size, part=-(-size // ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCut:
    """How a weight that multiplies as [k, n] is held: `columns` cuts n, `rows` cuts k, `groups` the independent
    products (experts, heads, channels). None: whole in that direction."""

    columns: Cut | None = None
    rows: Cut | None = None
    groups: Cut | None = None

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """This rank's part of the parameter: groups lie in the first dimension, columns (else rows) in the first other
        one of their size."""
        part, free = list(shape), list(range(len(shape)))
        for cut in (self.groups, self.columns, self.rows):
            if cut is None:
                continue
            fitting = [d for d in free if shape[d] == cut.whole] or [d for d in free if shape[d] % cut.whole == 0]
            if fitting:
                place = fitting[-1] if cut is self.rows else fitting[0]
                part[place] = cut.of(shape[place])
                free.remove(place)
        return tuple(part)


def part_of(product: Product, cut: WeightCut) -> Product:
    """One rank's product with a cut weight. In the backward dX sums over n and gives k, dW gives both."""
    columns, rows = cut.columns, cut.rows
    m, k, n, batch = product.m, product.k, product.n, product.batch
    if product.direction == "dx":
        k, n = _part(k, columns), _part(n, rows)
    elif product.direction == "dw":
        m, n = _part(m, columns), _part(n, rows)
    else:
        k, n = _part(k, rows), _part(n, columns)
    if cut.groups is not None and product.kind != "grouped":
        batch = _part(batch, cut.groups)
    return resized(product, batch=batch, m=m, k=k, n=n)


def _part(size: int, cut: Cut | None) -> int:
    return size if cut is None else cut.of(size)


def resized(product: Product, *, batch: int, m: int, k: int, n: int) -> Product:
    """The product with other sizes: FLOPs and bytes of each operand in proportion."""
    old = (product.batch, product.m, product.k, product.n)
    new = (batch, m, k, n)

    def scaled(value: int, *places: int) -> int:
        return value * prod(new[p] for p in places) // max(1, prod(old[p] for p in places))

    return replace(
        product,
        batch=batch,
        m=m,
        k=k,
        n=n,
        flops=scaled(product.flops, 0, 1, 2, 3),
        masked_flops=scaled(product.masked_flops, 0, 1, 2, 3),
        lhs_bytes=scaled(product.lhs_bytes, 0, 1, 2),
        rhs_bytes=scaled(product.rhs_bytes, 0, 2, 3),
        out_bytes=scaled(product.out_bytes, 0, 1, 3),
        weights=tuple((path, scaled(size, *_weight_places(product))) for path, size in product.weights),
    )


def _weight_places(product: Product) -> tuple[int, ...]:
    """Which of (batch, m, k, n) a weight's size is made of."""
    if product.kind == "grouped":  # its size counts all experts, batch those with rows
        return {"dx": (2, 3), "dw": (1, 3)}.get(product.direction, (2, 3))
    return {"dx": (0, 2, 3), "dw": (0, 1, 3)}.get(product.direction, (0, 2, 3))


def part_of_experts(product: Product, call: ExpertCall, cut: Cut, copies: int) -> Product:
    """One rank's product over the experts it holds. `copies`: batches of as many tokens that reach them."""
    rows = _rows_of_all(call.rows, copies)[: cut.part]
    busy, total, before = sum(1 for count in rows if count), sum(rows), max(1, sum(call.rows))
    mean = -(-total // busy) if busy else 0
    summed = product.direction == "dw"  # a weight's gradient sums over the rows
    m, k = (product.m, mean) if summed else (mean, product.k)
    part = resized(product, batch=busy, m=m, k=k, n=product.n)
    flops, lhs, rhs, out = (
        value * total // before for value in (product.flops, product.lhs_bytes, product.rhs_bytes, product.out_bytes)
    )
    return replace(
        part,
        flops=flops,
        masked_flops=flops,
        lhs_bytes=lhs,
        rhs_bytes=rhs if summed else part.rhs_bytes,
        out_bytes=part.out_bytes if summed else out,
        weights=tuple((path, size * cut.part // cut.whole) for path, size in product.weights),
        experts=ExpertCall(experts=cut.part, top_k=0, tokens=call.tokens * copies, rows=rows),
    )


def _rows_of_all(rows: tuple[int, ...], copies: int) -> tuple[int, ...]:
    """Rows of each expert with the tokens of all batches: an even spread stays even, any other is repeated."""
    if max(rows) - min(rows) > 1:
        return tuple(count * copies for count in rows)
    share, extra = divmod(sum(rows) * copies, len(rows))
    return tuple(share + (expert < extra) for expert in range(len(rows)))


def part_of_attention(product: Product, query_heads: int, kv_heads: int) -> Product:
    """One rank's heads of an attention product; keys and values are read once for each KV head."""
    call = product.attention
    assert call is not None
    part = resized(
        product, batch=product.batch * query_heads // call.query_heads, m=product.m, k=product.k, n=product.n
    )
    return replace(
        part,
        rhs_bytes=product.rhs_bytes * kv_heads // call.kv_heads,
        attention=replace(call, query_heads=query_heads, kv_heads=kv_heads),
    )


def part_of_activations(product: Product, ranks: int) -> Product:
    """One rank's share of a product of two cut activations: of its independent products, else of its columns."""
    if product.batch % ranks == 0:
        return resized(product, batch=product.batch // ranks, m=product.m, k=product.k, n=product.n)
    return resized(product, batch=product.batch, m=product.m, k=product.k, n=-(-product.n // ranks))


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Limit:
    """A size that bounds a degree: it must divide by it; `shared` sizes (KV heads) may also divide it."""

    what: str
    module: str
    size: int
    degree: Literal["tp", "ep"] = "tp"
    shared: bool = False

    def allows(self, ranks: int) -> bool:
        """Whether this many ranks can share the size."""
        return self.size % ranks == 0 or (self.shared and ranks % self.size == 0)

    def __str__(self) -> str:
        return f"{self.size} {self.what} of {self.module}"


def nearest_degrees(limits: Iterable[Limit], asked: int) -> tuple[int, ...]:
    """The next smaller and the next larger number of ranks that every limit allows."""
    bounds = list(limits)
    largest = max((limit.size for limit in bounds), default=asked)
    top = min((limit.size for limit in bounds if not limit.shared), default=asked)  # no more ranks than that divide it
    smaller = next((n for n in range(min(asked - 1, top), 0, -1) if all(limit.allows(n) for limit in bounds)), None)
    larger = next((n for n in range(asked + 1, largest + 1) if all(limit.allows(n) for limit in bounds)), None)
    return tuple(n for n in (smaller, larger) if n is not None)
