"""The table of products: one row for equal products of equal layers, the same in every command that prints it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from introspect.analyzers._folding import Layer, LayerPaths, layer_ranges
from introspect.analyzers._products import Product
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
    rows: int = 0
    params: int = 0
    flops: int = 0
    masked_flops: int = 0
    bytes: int = 0


def gemm_table(found: Iterable[Product], paths: LayerPaths, *, per_layer: bool = False) -> Table:
    """Rows in order of first appearance. `params` counts a parameter in the first row that multiplies by it, so that
    the column sums to the parameters that are in products at all; m of a grouped row is the mean over experts with
    rows, rounded up."""
    rows: dict[tuple[object, ...], _Row] = {}
    counted: set[str] = set()
    for product in found:
        pattern, layer = paths.split(product.module)
        module = product.module if per_layer else pattern
        row = rows.setdefault(_key(product, module), _Row(first=product, module=module))
        row.layers.append(layer)
        row.count += product.times
        row.batch += product.times * product.batch
        row.rows += product.times * product.batch * product.m
        row.flops += product.times * product.flops
        row.masked_flops += product.times * product.masked_flops
        row.bytes += product.times * product.bytes
        row.params += sum(size for path, size in product.weights if path not in counted)
        counted.update(path for path, _ in product.weights)
    total = sum(row.flops for row in rows.values())
    return Table(units=UNITS, rows=tuple(_cells(row, total) for row in rows.values()))


def _key(product: Product, module: str) -> tuple[object, ...]:
    # Under a random routing the rows differ from layer to layer and not the product: they are averaged.
    size = () if product.kind == "grouped" else (product.batch, product.m)
    call = product.attention
    heads = (call.query_heads, call.kv_heads, call.window) if call else ()
    return (module, product.kind, product.direction, *size, product.k, product.n, product.dtype, *heads)


def _cells(row: _Row, total: int) -> dict[str, Value]:
    first, call = row.first, row.first.attention
    batch, m = first.batch, first.m
    if first.kind == "grouped":
        batch, m = round(row.batch / row.count), -(-row.rows // row.batch) if row.batch else 0
    return {
        "module": row.module,
        "layers": layer_ranges(row.layers),
        "kind": first.kind,
        "direction": first.direction,
        "count": row.count,
        "batch": batch,
        "m": m,
        "k": first.k,
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
