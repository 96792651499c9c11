"""Every matrix product of a record with what a table needs: whose it is, its operands' bytes, its parallel kind.

FLOPs are 2*m*k*n for each of `batch` products. Bytes are the operands once and the result once; the probabilities of
fused attention are never stored and count nothing. A product is named after the parameter it multiplies by where that
is the running module's own (`experts.gate_up_proj`), else after the running module.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from introspect.analyzers._structure import Structure
from introspect.graph import Graph
from introspect.records import AttentionCall, Direction, ExpertCall, Gemm, GemmKind, Op
from introspect.units import tensor_bytes

Parallel = Literal["column", "latent", "router", ""]
WHOLE = (0, Fraction(1))
"""The part of a product that multiplies by a whole parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One product of one op. FLOPs and bytes are of one run of it; it ran `times` times.

    `weights`: the parameters that are an operand, with their sizes, () for attention; `parts`: where the operand begins
    in each, and its share of it (1 unless it is a view of some rows). `masked_flops`: FLOPs over the
    pairs that the mask lets through (equal to `flops` where no mask is). `source`: the value read as data, equal for
    products of the same input. `parallel`: what becomes of the result: "column" is split by heads or channels, "latent"
    feeds another projection, "router" chooses experts; "" is not looked at.
    """

    ops: tuple[int, ...]  # positions in Graph.ops: one, several where products are merged, none for backward
    module: str
    kind: GemmKind
    direction: Direction
    times: int
    batch: int
    m: int
    k: int
    n: int
    dtype: str
    flops: int
    masked_flops: int
    lhs_bytes: int
    rhs_bytes: int
    out_bytes: int
    weights: tuple[tuple[str, int], ...] = ()
    parts: tuple[tuple[int, Fraction], ...] = ()
    attention: AttentionCall | None = None
    experts: ExpertCall | None = None
    source: tuple[object, ...] | None = None
    parallel: Parallel = ""

    @property
    def op(self) -> int:
        """Position of its (first) op in Graph.ops; -1 for backward."""
        return self.ops[0] if self.ops else -1

    @property
    def bytes(self) -> int:
        """Operands once and the result once."""
        return self.lhs_bytes + self.rhs_bytes + self.out_bytes


def products(structure: Structure) -> list[Product]:
    """All products of the record in order, backward ones included. Constants times constants are none."""
    graph = structure.graph
    reader = _Reader(structure)
    found = []
    for i, op in enumerate(graph.ops):
        for gemm in op.gemms:
            if graph.gemm_reads_data(i, gemm):
                found.append(reader.forward(i, gemm))
    for op, times in graph.trace.walk():
        if op.backward:
            found += [reader.backward(op, times, gemm) for gemm in op.gemms]
    return found


def fuse(found: list[Product]) -> list[Product]:
    """Merge forward Linears of one parent module and one parallel kind that read the same value: n adds up."""
    groups: dict[tuple[object, ...], list[Product]] = {}
    for product in found:
        key: tuple[object, ...] = (id(product),)
        if product.kind == "linear" and product.parallel in ("column", "latent"):
            key = (product.module.rpartition(".")[0], product.parallel, product.source, product.times)
        groups.setdefault(key, []).append(product)
    return [group[0] if len(group) == 1 else _merged(group) for group in groups.values()]


def _merged(group: list[Product]) -> Product:
    parent = group[0].module.rpartition(".")[0]
    leaves = "+".join(product.module.rpartition(".")[2] for product in group)
    return replace(
        group[0],
        ops=tuple(p.op for p in group),
        module=f"{parent}.{leaves}" if parent else leaves,
        n=sum(p.n for p in group),
        flops=sum(p.flops for p in group),
        masked_flops=sum(p.masked_flops for p in group),
        rhs_bytes=sum(p.rhs_bytes for p in group),
        out_bytes=sum(p.out_bytes for p in group),
        weights=tuple(weight for p in group for weight in p.weights),
        parts=tuple(part for p in group for part in p.parts),
    )


class _Reader:
    """Turns recorded Gemms into Products."""

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self.graph: Graph = structure.graph
        self.sizes = {p.path: p.count for p in self.graph.trace.parameters}
        self.calls: dict[
            int, tuple[AttentionCall, int]
        ] = {}  # storage of an operand -> call, its dense pairs of a head
        for op in self.graph.ops:
            if op.attention is not None:
                scores = op.gemms[0]
                dense = scores.batch * scores.m * scores.n // op.attention.query_heads
                for t in (op.attention.v, op.attention.k, op.attention.q):
                    self.calls[self.graph.tensors[t].storage] = (op.attention, dense)

    def forward(self, i: int, gemm: Gemm) -> Product:
        graph, op = self.graph, self.graph.ops[i]
        weights = graph.gemm_weights(i, gemm)
        value = gemm.lhs if gemm.lhs is not None else gemm.rhs
        return self._product(
            op,
            graph.times[i],
            gemm,
            weights,
            ops=(i,),
            source=None if value is None else (graph.producer_of(i, value), *graph.where(value)),
            parallel=self._parallel(i) if weights else "",
        )

    def backward(self, op: Op, times: int, gemm: Gemm) -> Product:
        paths = {self.graph.tensors[t].parameter for t in (gemm.lhs, gemm.rhs) if t is not None}
        return self._product(op, times, gemm, frozenset(path for path in paths if path is not None))

    def _product(
        self,
        op: Op,
        times: int,
        gemm: Gemm,
        weights: frozenset[str],
        *,
        ops: tuple[int, ...] = (),
        source: tuple[object, ...] | None = None,
        parallel: Parallel = "",
    ) -> Product:
        lhs, rhs, out = (self._bytes(gemm, place) for place in ("lhs", "rhs", "out"))
        attention, masked = self._masked(op, gemm)
        operand = gemm.lhs if gemm.lhs is not None else gemm.rhs
        return Product(
            ops=ops,
            module=_name(op, weights),
            kind="linear" if gemm.kind == "einsum" and gemm.batch == 1 and weights else gemm.kind,
            direction=gemm.direction,
            times=times,
            batch=gemm.batch,
            m=gemm.m,
            k=gemm.k,
            n=gemm.n,
            dtype="" if operand is None else self.graph.tensors[operand].dtype,
            flops=gemm.flops,
            masked_flops=masked,
            lhs_bytes=lhs,
            rhs_bytes=rhs,
            out_bytes=out,
            weights=tuple((path, self.sizes[path]) for path in sorted(weights)),
            parts=tuple(self._part(gemm, path) for path in sorted(weights)),
            attention=attention,
            experts=op.experts,
            source=source,
            parallel=parallel,
        )

    def _part(self, gemm: Gemm, path: str) -> tuple[int, Fraction]:
        """Where in the parameter the product's operand begins, and its share of it."""
        for t in (gemm.lhs, gemm.rhs):
            if t is not None and (view := self.graph.tensors[t]).parameter == path:
                return view.offset, min(Fraction(1), Fraction(view.elements, self.sizes[path] or 1))
        return WHOLE

    def _bytes(self, gemm: Gemm, place: Literal["lhs", "rhs", "out"]) -> int:
        index = {"lhs": gemm.lhs, "rhs": gemm.rhs, "out": gemm.out}[place]
        if index is None:
            return 0
        if gemm.kind != "grouped":
            return self.graph.bytes[index]
        rows = gemm.rows if gemm.rows is not None else gemm.batch * gemm.m
        shapes = {"lhs": (rows, gemm.k), "rhs": (gemm.batch, gemm.k, gemm.n), "out": (rows, gemm.n)}
        if gemm.direction == "dw":  # the rows are summed over
            shapes = {"lhs": (rows, gemm.m), "rhs": (rows, gemm.n), "out": (gemm.batch, gemm.m, gemm.n)}
        return tensor_bytes(shapes[place], self.graph.tensors[index].dtype)

    def _masked(self, op: Op, gemm: Gemm) -> tuple[AttentionCall | None, int]:
        """The attention call of this product, and its FLOPs over visible pairs: dense FLOPs x visible / dense."""
        if gemm.kind in ("attention_qk", "attention_pv"):
            for t in op.inputs:
                if (known := self.calls.get(self.graph.tensors[t].storage)) is not None:
                    call, dense = known
                    return call, gemm.flops * call.visible_pairs // dense
        return None, gemm.flops

    def _parallel(self, i: int) -> Parallel:
        structure = self.structure
        if i in structure.router:
            return "router"
        if i not in structure.mixers or i in structure.mixed:
            return "column"
        near = self.graph.ahead(
            self.graph.consumers[i], lambda j: structure.stream[j] or structure.core[j] or j in structure.mixed
        )
        following = {j for k in (*near, i) for j in self.graph.consumers[k]} - structure.mixed
        feeds = any(j in structure.matrices and self.graph.ops[j].gemms[0].kind != "conv" for j in following)
        return "latent" if feeds else "column"


def _name(op: Op, weights: Iterable[str]) -> str:
    for path in weights:
        if not op.module or path.startswith(f"{op.module}."):
            return path.removesuffix(".weight")
    return op.module
