"""The table of products: one row for equal products of equal layers, the same in every command that prints it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from introspect.analyzers._folding import Layer, LayerPaths, layer_ranges
from introspect.analyzers._products import WHOLE, Product
from introspect.table import Table, Value

UNITS = {
    "module": "",
    "layers": "",
    "kind": "",
    "direction": "",
    "count": "",
    "batch": "",
    "m": "",
    "k": "",
    "n": "",
    "dtype": "",
    "params": "",
    "flops": "FLOP",
    "share": "share",
    "bytes": "B",
    "intensity": "FLOP/B",
    "query_heads": "",
    "kv_heads": "",
    "group": "",
    "window": "",
    "masked_flops": "FLOP",
}


@dataclass(slots=True)
class _Row:
    """Products folded into one row; sums are over all of them and all their runs."""

    first: Product
    module: str
    layers: list[Layer] = field(default_factory=list)
    count: int = 0
    batch: int = 0
    params: int = 0
    flops: int = 0
    masked_flops: int = 0
    bytes: int = 0


class _Counted:
    """Which parameters, and which parts of them, are in a row already."""

    def __init__(self) -> None:
        self._parts: set[tuple[object, ...]] = set()
        self._params: Counter[str] = Counter()

    def new_in(self, product: Product) -> int:
        """Elements of the product's weights that no product before multiplied by."""
        found = 0
        parts = product.parts if len(product.parts) == len(product.weights) else (WHOLE,) * len(product.weights)
        for (path, size), (offset, share) in zip(product.weights, parts, strict=True):
            if (path, offset, share) not in self._parts:
                self._parts.add((path, offset, share))
                new = min(int(size * share), size - self._params[path])
                self._params[path] += new
                found += new
        return found


def gemm_table(found: Iterable[Product], paths: LayerPaths, *, per_layer: bool = False) -> Table:
    """Rows in order of first appearance. `params` counts a parameter, or a part of one, in the first row that uses it:
    the column sums to the parameters that are in products at all. batch and m of a grouped row are means, over layers
    and over experts with rows."""
    rows: dict[tuple[object, ...], _Row] = {}
    counted = _Counted()
    for product in found:
        pattern, layer = paths.split(product.module)
        module = product.module if per_layer else pattern
        row = rows.setdefault(_key(product, module), _Row(first=product, module=module))
        row.layers.append(layer)
        row.count += product.times
        row.batch += product.times * product.batch
        row.flops += product.times * product.flops
        row.masked_flops += product.times * product.masked_flops
        row.bytes += product.times * product.bytes
        row.params += counted.new_in(product)
    total = sum(row.flops for row in rows.values())
    return Table(units=UNITS, rows=tuple(_cells(row, total) for row in rows.values()))


def _key(product: Product, module: str) -> tuple[object, ...]:
    # Under a random routing the rows differ from layer to layer and not the product: they are averaged.
    size = () if product.kind == "grouped" else (product.batch, product.m)
    call = product.attention
    heads = (call.query_heads, call.kv_heads, call.window) if call else ()
    return (module, product.kind, product.direction, *size, product.k, product.n, product.dtype, *heads)


def _sizes(row: _Row) -> tuple[Value, Value, Value]:
    """batch, m and k of one product; of a grouped one the means, so that 2 x count x batch x m x k x n are its FLOPs.

    The rows of an expert are m, and k where its weight's gradient sums over them.
    """
    first = row.first
    if first.kind != "grouped" or not row.batch:
        return first.batch, first.m, first.k
    batch = _mean(row.batch, row.count)
    if first.direction == "dw":
        return batch, first.m, _mean(row.flops, 2 * row.batch * first.m * first.n)
    return batch, _mean(row.flops, 2 * row.batch * first.k * first.n), first.k


def _mean(total: int, count: int) -> int | float:
    return total / count if total % count else total // count


def _cells(row: _Row, total: int) -> dict[str, Value]:
    first, call = row.first, row.first.attention
    batch, m, k = _sizes(row)
    return {
        "module": row.module,
        "layers": layer_ranges(row.layers),
        "kind": first.kind,
        "direction": first.direction,
        "count": row.count,
        "batch": batch,
        "m": m,
        "k": k,
        "n": first.n,
        "dtype": first.dtype,
        "params": row.params,
        "flops": row.flops,
        "share": row.flops / total if total else 0.0,
        "bytes": row.bytes,
        "intensity": row.flops / row.bytes if row.bytes else None,
        "query_heads": call.query_heads if call else None,
        "kv_heads": call.kv_heads if call else None,
        "group": call.query_heads // call.kv_heads if call else None,
        "window": call.window if call else None,
        "masked_flops": row.masked_flops,
    }
