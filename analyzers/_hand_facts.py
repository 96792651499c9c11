"""What the hand formulas change, read off the graph: matrices of heads, feed-forward chains, the head, FLOPs.

Each matrix comes with the dimension that a rule would size otherwise, so that the rule can replace this dimension and
nothing else. Biases stay as they are under every rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from introspect.analyzers._products import Product
from introspect.analyzers._step import Step
from introspect.analyzers._structure import Structure
from introspect.records import AttentionCall, Gemm

Role = Literal["query", "key", "value", "result"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadMatrix:
    """The part of a weight that makes queries, keys or values of `heads` heads, or reads their results.

    `across`: its other dimension. A head is `width` wide, and `rotary` beside it where the part that carries positions
    has a width of its own (latent attention). `query_heads` and `key_heads` of the attention it belongs to.
    """

    role: Role
    across: int
    heads: int
    width: int
    rotary: int
    query_heads: int
    key_heads: int

    def sized(self, *, heads: int | None = None, width: int | None = None) -> int:
        """Elements with another number or width of heads."""
        kept = (heads or self.heads, (width or self.width) + self.rotary)
        return self.across * kept[0] * kept[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class FfnChain:
    """Products from the stream to a width and the one back from it: a dense FFN, or all experts of one layer.

    `inner` is what the first products give in all: `width`, or twice that where one half gates the other. `model`: the
    width of the result. `dense`: no expert, routed or shared.
    """

    layer: str
    model: int
    width: int
    inner: int
    up_params: int
    down_params: int
    dense: bool


def head_matrices(structure: Structure) -> tuple[HeadMatrix, ...]:
    """Of every attention call; a weight that several calls use counts once."""
    found: dict[tuple[str, frozenset[str]], HeadMatrix] = {}
    for i, op in enumerate(structure.graph.ops):
        if op.attention is not None:
            for j, matrix in _of_call(structure, i, op.attention):
                found.setdefault((matrix.role, structure.matrices[j]), matrix)
    return tuple(found.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One attention call: the weight products that make its operands, and the op that multiplies by the values."""

    heads: int
    key_heads: int
    key_width: int
    value_width: int
    queries: set[int]
    keys: set[int]
    values: set[int]
    context: int


def _read(structure: Structure, i: int, call: AttentionCall) -> _Call:
    # an eager product may read the keys transposed, so their width is the query's
    key_width, value_width = (structure.graph.tensors[t].shape[-1] for t in (call.q, call.v))
    ops = structure.graph.ops
    # the same op where attention is fused, a later one where it is written out
    context = next((j for j in range(i, len(ops)) if ops[j].gemms and call.v in ops[j].inputs), i)
    found = _Call(
        heads=call.query_heads,
        key_heads=call.kv_heads,
        key_width=key_width,
        value_width=value_width,
        queries=_made_by(structure, i, call.q),
        keys=_made_by(structure, i, call.k),
        values=_made_by(structure, context, call.v),
        context=context,
    )
    return replace(found, key_heads=_key_heads(structure, found))


def _of_call(structure: Structure, i: int, call: AttentionCall) -> Iterator[tuple[int, HeadMatrix]]:
    """Each matrix with the product it is in. What no weight product makes is left out."""
    read = _read(structure, i, call)
    both, nope = read.keys & read.values, read.key_width
    if both and read.keys - read.values:  # a latent's expansion makes both, another product the rotary part
        nope = _gemm(structure, min(both)).n // read.key_heads - read.value_width
        nope = nope if 0 < nope < read.key_width else read.key_width
    rotary = read.key_width - nope
    values_are_keys = both and not rotary and _gemm(structure, min(both)).n == read.key_heads * read.key_width
    parts: tuple[tuple[Role, set[int], int, int, int], ...] = (
        ("query", read.queries, read.heads, nope, rotary),
        ("key", both if rotary else read.keys, read.key_heads, nope, 0),
        ("value", set() if values_are_keys else read.values, read.key_heads, read.value_width, 0),
        ("result", _readers_of_result(structure, read), read.heads, read.value_width, 0),
    )
    for role, products, heads, width, beside in parts:
        for j in sorted(products, key=lambda j: -_gemm(structure, j).n)[:1]:
            gemm = _gemm(structure, j)
            if role == "result" or gemm.n >= heads * (width + beside):
                yield (
                    j,
                    HeadMatrix(
                        role=role,
                        across=gemm.n if role == "result" else gemm.k,
                        heads=heads,
                        width=width,
                        rotary=beside,
                        query_heads=read.heads,
                        key_heads=read.key_heads,
                    ),
                )


def _key_heads(structure: Structure, read: _Call) -> int:
    """Heads of the key projection, from its size: the code may repeat heads before it caches or attends them."""
    if len(read.keys) != 1:
        return read.key_heads
    (j,) = read.keys
    n, unit = _gemm(structure, j).n, read.key_width
    if j in read.queries:  # one product makes all three
        n, unit = n - read.heads * read.key_width, read.key_width + read.value_width
    elif j in read.values and n != read.key_heads * read.key_width:
        unit = read.key_width + read.value_width
    return n // unit if n % unit == 0 and 0 < n // unit <= read.heads else read.key_heads


def _gemm(structure: Structure, i: int) -> Gemm:
    return structure.graph.ops[i].gemms[0]


def _made_by(structure: Structure, i: int, tensor: int | None) -> set[int]:
    """Weight products that an operand of op i follows from, with neither a core nor the stream in between."""
    start = -1 if tensor is None else structure.graph.producer_of(i, tensor)
    near = structure.graph.back([start], lambda j: structure.core[j] or structure.stream[j])
    cores = {p for j in near for p in structure.graph.data_producers(j)} | {start}
    return cores & structure.matrices.keys()


def _readers_of_result(structure: Structure, read: _Call) -> set[int]:
    """Weight products that read what attention gave, as it is: heads side by side."""
    graph = structure.graph
    start = graph.consumers[read.context]
    after = graph.ahead(start, lambda j: structure.core[j] or structure.stream[j])
    readers = {j for k in (read.context, *after) for j in graph.consumers[k] if j in structure.matrices}
    return {j for j in readers if _gemm(structure, j).k == read.heads * read.value_width}


def ffn_chains(structure: Structure) -> tuple[FfnChain, ...]:
    """Every feed-forward chain; one whose weights several layers share counts once."""
    blocks = structure.ffn | (structure.experts & structure.matrices.keys())
    found: dict[frozenset[str], FfnChain] = {}
    for i in sorted(blocks):
        down = _gemm(structure, i)
        ups = _made_by(structure, i, down.lhs) & blocks
        if ups:
            found.setdefault(
                structure.matrices[i],
                FfnChain(
                    layer=structure.layer_of(i) or structure.graph.ops[i].module,
                    model=down.n,
                    width=down.k,
                    inner=sum(_gemm(structure, j).n for j in ups),
                    up_params=_count(structure, ups),
                    down_params=_count(structure, (i,)),
                    dense=not ({i, *ups} & (structure.experts | structure.shared_experts)),
                ),
            )
    return tuple(found.values())


def head_params(structure: Structure) -> tuple[int, int]:
    """Elements of the head that are its own, and those of a head that is a table of the model."""
    graph = structure.graph
    tables = {graph.tensors[op.inputs[0]].parameter for op in graph.ops if op.kind == "lookup"}
    paths = {path for i in structure.heads for path in structure.matrices[i]}
    sizes = {p.path: p.count for p in graph.trace.parameters}
    tied = sum(sizes[path] for path in paths & tables)
    return sum(sizes[path] for path in paths) - tied, tied


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFlops:
    """FLOPs of weights for one new token: as the code executes them, as an engine does, and with every expert."""

    executed: int
    engine: int
    all_experts: int


def token_flops(step: Step) -> TokenFlops:
    """Of the forward. The head runs for every token: an engine's prefill, which leaves that out, is no token's cost."""
    heads, tokens = step.structure.heads, step.trace.run.tokens
    executed = [product for product in step.executed if product.weights and product.direction == "forward"]
    engine = [product for product in step.engine if product.weights and product.direction == "forward"]
    needed = [product for product in engine if product.op not in heads]
    needed += [product for product in executed if product.op in heads]
    return TokenFlops(
        executed=sum(product.flops * product.times for product in executed) // tokens,
        engine=sum(product.flops * product.times for product in needed) // tokens,
        all_experts=sum(_with_every_expert(product) * product.times for product in needed) // tokens,
    )


def _with_every_expert(product: Product) -> int:
    call = product.experts
    return product.flops * call.experts // call.top_k if call is not None and call.top_k else product.flops


def layers_beside(structure: Structure) -> int:
    """Layers of the stacks that attention runs in, those without attention included."""
    graph, layers = structure.graph, structure.layers
    attending = (structure.layer_of(i) for i, op in enumerate(graph.ops) if op.attention is not None)
    stacks = {layer.rpartition(".")[0] for layer in attending if layer is not None}
    return sum(layers.layer_path(path) == path and path.rpartition(".")[0] in stacks for path in graph.trace.modules)


def _count(structure: Structure, products: Iterable[int]) -> int:
    sizes = {p.path: p.count for p in structure.graph.trace.parameters}
    return sum(sizes[path] for path in {path for j in products for path in structure.matrices[j]})
