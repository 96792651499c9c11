"""Bytes a step moves and holds: weights, cache, activations, and what is alive at once.

Weights: every parameter the forward reads, once; a lookup reads one row for each index, a grouped product the experts
that have rows. With E experts and T tokens of k different experts each, drawn independently and uniformly,
E*(1 - (1 - k/E)^T) experts are read on average, at least k and at most min(E, T*k).
Cache: what it held before the step and the step read; what the step put into it (the new tokens of a cache that grows,
at most what it then keeps; the whole of a state).
Activations: operands and results of products, weights and cache apart, each once (element-wise work fused away).
Peak: each storage from its first write to its last use, parameters and cache apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from introspect.analyzers._products import Product
from introspect.graph import Graph, base_name
from introspect.records import ExpertCall, Op, Trace

_MOVES_NOTHING = ("layout", "factory")
_OVERWRITES = ("copy", "cache_write", "scatter")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReads:
    """Bytes of parameters that one forward reads, by how many routed experts are counted."""

    expected: int
    floor: int
    ceiling: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTraffic:
    """Bytes of the model's cache that one step reads and writes."""

    read: int
    written: int


def rows_of_tokens(call: ExpertCall) -> int:
    """Rows the tokens were routed to in this block: top-k each, fewer where some choices compute nothing (identity
    experts, experts of another rank), and no more where an implementation multiplies every expert."""
    return min(call.tokens * call.top_k, sum(call.rows))


def expected_experts(experts: int, top_k: float, tokens: int) -> float:
    """Expected distinct experts that `tokens` tokens are sent to: E*(1 - (1 - k/E)^T)."""
    return float(experts * (1 - (1 - top_k / experts) ** tokens))


def weight_reads(graph: Graph) -> WeightReads:
    """Bytes of parameters that the forward ops read."""
    sizes = {p.path: p.bytes for p in graph.trace.parameters if not p.buffer}
    views: defaultdict[str, dict[object, int]] = defaultdict(dict)
    shares: dict[str, tuple[float, float, float]] = {}
    for i, op in enumerate(graph.ops):
        if op.kind in _MOVES_NOTHING:
            continue
        for t in op.inputs:
            path = graph.tensors[t].parameter
            if path is None or path not in sizes:
                continue
            if op.kind in ("lookup", "gather"):
                views[path][i] = graph.bytes[op.outputs[0]]
            else:
                views[path][graph.where(t)] = graph.bytes[t]
            if op.experts is not None:
                shares[path] = _expert_shares(op.experts)
    read = {path: min(sizes[path], sum(parts.values())) for path, parts in views.items()}
    whole = (1.0, 1.0, 1.0)
    expected, floor, ceiling = (
        round(sum(count * shares.get(path, whole)[place] for path, count in read.items())) for place in range(3)
    )
    return WeightReads(expected=expected, floor=floor, ceiling=ceiling)


def _expert_shares(call: ExpertCall) -> tuple[float, float, float]:
    """Expected, smallest and largest share of the experts that is read; the recorded one where top-k is unknown."""
    if not call.top_k:
        busy = sum(1 for rows in call.rows if rows) / call.experts
        return busy, busy, busy
    chosen = rows_of_tokens(call) / call.tokens
    expected = expected_experts(call.experts, chosen, call.tokens)
    most = min(call.experts, call.tokens * chosen)
    return expected / call.experts, min(1.0, chosen / call.experts), most / call.experts


def cache_traffic(graph: Graph) -> CacheTraffic:
    """Bytes the step reads of what the cache held, and bytes it puts into it."""
    views: defaultdict[int, dict[object, int]] = defaultdict(dict)
    put: dict[int, int] = {}
    for i, op in enumerate(graph.ops):
        if op.kind == "factory" or graph.views[i]:
            continue
        written = {graph.tensors[t].storage for t in op.outputs}
        for slot, t in enumerate(op.inputs):
            tensor = graph.tensors[t]
            overwritten = tensor.storage in written and op.kind in _OVERWRITES
            if tensor.role == "cache" and graph.producers[i][slot] < 0 and not overwritten:
                views[tensor.storage][graph.where(t)] = graph.bytes[t]
        for t in op.outputs:
            if graph.tensors[t].role == "cache":
                put[graph.tensors[t].storage] = _new_bytes(graph, op, t)
    storage_bytes = {t.storage: t.storage_bytes for t in graph.tensors if t.role == "cache"}
    read = sum(
        min(sum(parts.values()), storage_bytes[storage] or sum(parts.values())) for storage, parts in views.items()
    )
    held = {entry.storage: entry.bytes_after for entry in graph.trace.cache}
    return CacheTraffic(
        read=read, written=sum(min(count, held[storage]) for storage, count in put.items() if storage in held)
    )


def _new_bytes(graph: Graph, op: Op, out: int) -> int:
    """Bytes that an op adds to a cache tensor: what a concatenation appends, else the whole result."""
    if base_name(op) == "cat":
        return sum(graph.bytes[t] for t in op.inputs if graph.tensors[t].role != "cache")
    return graph.bytes[out]


def activation_bytes(found: Iterable[Product]) -> int:
    """Bytes of activations that products read and write; keys and values of attention count as cache."""
    total = 0
    for product in found:
        cached = product.rhs_bytes if product.weights or product.attention is not None else 0
        total += product.times * (product.bytes - cached)
    return total


def peak_activation_bytes(trace: Trace) -> int:
    """Most bytes of activation storages alive at once."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    size: dict[int, int] = {}
    for position, (op, _) in enumerate(trace.walk()):
        for t in (*op.inputs, *op.outputs):
            tensor = trace.tensors[t]
            if tensor.parameter is None and tensor.role != "cache":
                first.setdefault(tensor.storage, position)
                last[tensor.storage] = position
                size[tensor.storage] = tensor.storage_bytes
    change: defaultdict[int, int] = defaultdict(int)
    for storage, count in size.items():
        change[first[storage]] += count
        change[last[storage] + 1] -= count
    alive = peak = 0
    for position in sorted(change):
        alive += change[position]
        peak = max(peak, alive)
    return peak
