"""Latent attention (MLA) found in the graph: keys and values both come from one weight product that reads the cache.

The cache holds a latent of rank r for each token, and a product [tokens, r] x [r, H*(d_nope + d_v)] expands it to keys
and values of H heads on every step. An engine may instead multiply the query by the key half of that matrix and the
result by its value half (absorption): attention then runs on the latent itself, one key head of r + d_rope, one value
head of r. With T new tokens, L keys and P visible pairs of a head:

    expanded: 2*L*r*H*(d_nope + d_v) + 2*P*H*(d_nope + d_rope + d_v)
    absorbed: 2*T*r*H*(d_nope + d_v) + 2*P*H*(r + d_rope + r)

(DeepSeek-V2, arXiv:2405.04434, section 2.1). Widths are read off the shapes: v's width is d_v, the product's n is
H*(d_nope + d_v), q's width is d_nope + d_rope.
"""

from __future__ import annotations

from dataclasses import dataclass

from introspect.analyzers._structure import Structure
from introspect.graph import Graph
from introspect.records import AttentionCall


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """One attention call whose keys and values are expanded from a cached latent. Positions are in Graph.ops."""

    attention: int
    expansion: int
    heads: int
    rank: int
    nope_width: int
    rope_width: int
    value_width: int

    def absorbed_flops(self, tokens: int, pairs: int) -> int:
        """FLOPs of both halves of the expansion on `tokens` queries and of attention over `pairs` of one head."""
        halves = 2 * tokens * self.rank * self.heads * (self.nope_width + self.value_width)
        return halves + 2 * pairs * self.heads * (2 * self.rank + self.rope_width)


def latent_attention(structure: Structure) -> list[LatentAttention]:
    """Every latent attention of the record, in order; none for a run without a cache."""
    found = []
    for i, op in enumerate(structure.graph.ops):
        if op.attention is not None and (latent := _latent(structure, i, op.attention)) is not None:
            found.append(latent)
    return found


def _latent(structure: Structure, i: int, call: AttentionCall) -> LatentAttention | None:
    graph = structure.graph
    common = nearest_cores(structure, i, call.k) & nearest_cores(structure, i, call.v)
    for j in sorted(common):
        if j not in structure.matrices or not _reads_cache(structure, j):
            continue
        expansion = graph.ops[j].gemms[0]
        query_width, value_width = graph.tensors[call.q].shape[-1], graph.tensors[call.v].shape[-1]
        nope_width = expansion.n // call.query_heads - value_width
        if expansion.n % call.query_heads == 0 and 0 < nope_width <= query_width:
            return LatentAttention(
                attention=i,
                expansion=j,
                heads=call.query_heads,
                rank=expansion.k,
                nope_width=nope_width,
                rope_width=query_width - nope_width,
                value_width=value_width,
            )
    return None


def nearest_cores(structure: Structure, i: int, tensor: int) -> set[int]:
    """Cores that an operand of op i comes from without another core in between."""
    graph = structure.graph
    start = graph.producer_of(i, tensor)
    near = graph.back([start], lambda j: structure.core[j])
    cores = {p for j in near for p in graph.data_producers(j) if structure.core[p]}
    return cores | ({start} if start >= 0 and structure.core[start] else set())


def _reads_cache(structure: Structure, j: int) -> bool:
    """Whether the data operand of product j is a cache tensor, or follows from one without a core in between."""
    graph = structure.graph
    data = graph.ops[j].gemms[0].lhs
    near = graph.back([graph.producer_of(j, data)] if data is not None else [], lambda p: structure.core[p])
    read = [t for p in (j, *near) for t in graph.ops[p].inputs] + [t for p in near for t in graph.ops[p].outputs]
    return any(_is_cache(graph, t) for t in read)


def _is_cache(graph: Graph, tensor: int) -> bool:
    return graph.tensors[tensor].role == "cache"
