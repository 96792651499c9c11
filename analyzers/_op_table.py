"""The table of everything that is no product: norms, rotations, activations, lookups and so on, and kernels counted.

`count` counts whole norms, rotations and so on; `kernels` the ops they were executed as. `bytes` is what those ops read
and write one by one, `fused_bytes` what enters and leaves the whole; a lookup or gather reads the rows it takes.
`compute_dtype` is the widest float type inside (an RMSNorm of a bf16 model computes in fp32). The softmax of an
attention call is shown without kernel and bytes of its own: fused kernels keep it on the chip, in fp32 (FlashAttention,
Dao et al. 2022), and transformers' eager attention computes it in fp32 too.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from introspect.analyzers._labels import Labels
from introspect.graph import Graph, base_name, is_allocation
from introspect.records import Op
from introspect.table import Table, Value
from introspect.units import DTYPE_BITS

UNITS = {
    "kind": "",
    "count": "",
    "kernels": "",
    "elements": "",
    "bytes": "B",
    "fused_bytes": "B",
    "compute_dtype": "",
}
_SELECTS = ("lookup", "gather")
_ABSORBED = ("setup", "weights", "bias", "cast", "copy")


@dataclass(slots=True)
class _Row:
    count: int = 0
    kernels: int = 0
    elements: int = 0
    bytes: int = 0
    fused_bytes: int = 0


def op_table(labels: Labels) -> Table:
    """One row for each kind and compute dtype, most bytes first."""
    graph = labels.graph
    rows: dict[tuple[str, str], _Row] = {}
    for first, members in labels.groups().items():
        times = graph.times[first]
        kernels = sum(1 for i in members if launches(graph.ops[i]))
        if not kernels:
            continue
        row = rows.setdefault((labels.kind[first], _compute_dtype(graph, members)), _Row())
        read, written = _boundary(graph, members)
        row.count += times
        row.kernels += times * kernels
        row.elements += times * sum(graph.tensors[t].elements for t in written)
        row.bytes += times * sum(op_bytes(graph, i) for i in members)
        row.fused_bytes += times * (read + sum(graph.bytes[t] for t in written))
    for i, op in enumerate(graph.ops):
        if op.attention is not None and len(op.gemms) > 1:
            row = rows.setdefault(("softmax", "fp32"), _Row())
            row.count += graph.times[i]
            row.elements += graph.times[i] * op.attention.query_heads * op.attention.visible_pairs
    ordered = sorted(rows.items(), key=lambda item: -item[1].bytes)
    return Table(units=UNITS, rows=tuple(_cells(kind, dtype, row) for (kind, dtype), row in ordered))


def _cells(kind: str, dtype: str, row: _Row) -> dict[str, Value]:
    return {
        "kind": kind,
        "count": row.count,
        "kernels": row.kernels,
        "elements": row.elements,
        "bytes": row.bytes,
        "fused_bytes": row.fused_bytes,
        "compute_dtype": dtype,
    }


def launches(op: Op) -> bool:
    """Whether an op runs a kernel: views and allocations do not."""
    return op.kind not in ("layout", "scalar") and not is_allocation(op)


def executed_kernels(graph: Graph) -> int:
    """Kernels of the step as its code runs, backward included; a fused attention op is one."""
    return sum(times for op, times in graph.trace.walk() if launches(op))


def fused_kernels(labels: Labels, merged: int) -> int:
    """Kernels of the forward with the usual fusions, `merged` of them with products (see fuse() in _products.py).

    One kernel for a norm with the residual add before it, for the rotations and for the cache write of an attention
    call, for an activation with its gate; routing is two, before the experts (choice, permutation) and after them
    (weighted sum). Casts, copies, biases, masks and positions disappear in others.
    """
    graph, structure, count = labels.graph, labels.structure, merged
    attention = [i for i, op in enumerate(graph.ops) if op.attention is not None]
    seen: set[tuple[str, int]] = set()
    for first, members in labels.groups().items():
        kind = labels.kind[first]
        routed = first in structure.dispatch and kind != "activation"
        if kind in _ABSORBED or routed or (kind == "residual" and _feeds_norm(labels, members[-1])):
            continue
        if kind in ("rope", "cache_write"):
            call = (kind, bisect(attention, first))
            if call in seen:
                continue
            seen.add(call)
        count += graph.times[first]
    return count + 2 * sum(graph.times[i] for i in structure.experts if _enters_experts(labels, i))


def _feeds_norm(labels: Labels, i: int) -> bool:
    return any(labels.kind.get(j) == "norm" for j in labels.graph.consumers[i])


def _enters_experts(labels: Labels, i: int) -> bool:
    """Whether expert product i is the first of its block: no other one between it and the stream."""
    graph, structure = labels.graph, labels.structure
    near = graph.back(graph.data_producers(i), lambda j: structure.core[j] or structure.stream[j])
    return not any(p in structure.experts for j in (*near, i) for p in graph.data_producers(j))


def op_bytes(graph: Graph, i: int) -> int:
    """Bytes op i reads and writes when it runs as a kernel of its own."""
    op = graph.ops[i]
    if not launches(op):
        return 0
    return sum(_read_bytes(graph, i, slot) for slot in range(len(op.inputs))) + sum(graph.bytes[t] for t in op.outputs)


def _read_bytes(graph: Graph, i: int, slot: int) -> int:
    """Bytes op i reads of one operand: none of a shape donor or of what it overwrites, the taken rows of a table."""
    op = graph.ops[i]
    if op.kind == "factory" or (slot == 0 and base_name(op) in ("copy", "fill", "zero")):
        return 0
    held = graph.bytes[op.inputs[slot]]
    return min(held, graph.bytes[op.outputs[0]]) if slot == 0 and op.kind in _SELECTS else held


def _boundary(graph: Graph, members: Sequence[int]) -> tuple[int, list[int]]:
    """Bytes that enter a group of ops, each value once, and the tensors that leave it."""
    inside = set(members)
    entering: dict[object, int] = {}
    leaving: list[int] = []
    for i in members:
        for slot, t in enumerate(graph.ops[i].inputs):
            if graph.producers[i][slot] not in inside:
                entering[graph.where(t)] = _read_bytes(graph, i, slot)
        if not inside.issuperset(graph.consumers[i]) or not graph.consumers[i]:
            leaving += graph.ops[i].outputs
    return sum(entering.values()), leaving


def _compute_dtype(graph: Graph, members: Sequence[int]) -> str:
    dtypes = [graph.tensors[t].dtype for i in members for t in (*graph.ops[i].inputs, *graph.ops[i].outputs)]
    floats = [dtype for dtype in dtypes if dtype.startswith(("fp", "bf", "complex"))]
    return max(floats or dtypes or [""], key=lambda dtype: DTYPE_BITS.get(dtype, 0))
