"""Fit the record of a run to its length: from runs at three short lengths to the record at the asked one.

A model that scans tokens or chunks in Python does the same things at every length; only sizes and counts grow. Two runs
give every number as a + b*length, the third must be predicted exactly, and then the numbers at the asked length follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from introspect.records import AttentionCall, ExpertCall, Gemm, Op, Repeat, Tensor
from introspect.units import DTYPE_BITS, tensor_bytes

Node = Op | Repeat


class NotAffine(Exception):
    """The runs differ in structure, or a number does not grow in proportion to the length."""


@dataclass(slots=True)
class Fit:
    """Three runs' tensor tables, their lengths and the asked length; collects the tensors at the asked length."""

    lengths: tuple[int, int, int]
    target: int
    tables: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]
    tensors: list[Tensor] = field(default_factory=list)
    _known: dict[tuple[int, ...], int] = field(default_factory=dict)

    def number(self, values: Sequence[int]) -> int:
        """The value at the asked length. Raises NotAffine."""
        (x1, x2, x3), (v1, v2, v3) = self.lengths, values
        slope = Fraction(v2 - v1, x2 - x1)
        at_target = v1 + slope * (self.target - x1)
        if v1 + slope * (x3 - x1) != v3 or at_target.denominator != 1 or at_target < 0:
            raise NotAffine(f"{values} at lengths {self.lengths}")
        return int(at_target)

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Every dimension at the asked length."""
        if len({len(s) for s in shapes}) != 1:
            raise NotAffine(f"ranks of {shapes}")
        return tuple(self.number(dims) for dims in zip(*shapes, strict=True))

    def nodes(self, runs: Sequence[Sequence[Node]]) -> tuple[Node, ...]:
        """The folded ops at the asked length. Raises NotAffine when the runs differ in structure."""
        if len({len(run) for run in runs}) != 1:
            raise NotAffine(f"{[len(run) for run in runs]} folded ops")
        return tuple(self._node(nodes) for nodes in zip(*runs, strict=True))

    def _node(self, nodes: tuple[Node, ...]) -> Node:
        repeats = [node for node in nodes if isinstance(node, Repeat)]
        ops = [node for node in nodes if isinstance(node, Op)]
        if len(repeats) == len(nodes):
            return Repeat(body=self.nodes([r.body for r in repeats]), count=self.number([r.count for r in repeats]))
        if repeats or len({(op.name, op.module, op.backward, len(op.gemms)) for op in ops}) != 1:
            raise NotAffine(f"different ops at one place: {[getattr(n, 'name', 'loop') for n in nodes]}")
        return self._op(ops)

    def _op(self, ops: Sequence[Op]) -> Op:
        return replace(
            ops[-1],
            inputs=self._tensors([op.inputs for op in ops]),
            outputs=self._tensors([op.outputs for op in ops]),
            gemms=tuple(self._gemm(gemms) for gemms in zip(*(op.gemms for op in ops), strict=True)),
            attention=self._attention(ops),
            experts=self._experts(ops),
        )

    def _tensors(self, indices: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        if len({len(i) for i in indices}) != 1:
            raise NotAffine(f"{[len(i) for i in indices]} operands")
        return tuple(self.tensor(i) for i in zip(*indices, strict=True))

    def tensor(self, indices: tuple[int, ...]) -> int:
        """Index (in `tensors`) of the view that stands at `indices` in the three runs."""
        known = self._known.get(indices)
        if known is not None:
            return known
        views = [table[i] for table, i in zip(self.tables, indices, strict=True)]
        shape = self.shape([v.shape for v in views])
        try:
            offset = self.number([v.offset for v in views])
        except NotAffine:  # a position inside a square tensor; offsets only tell views of one storage apart
            offset = views[-1].offset
        last = views[-1]
        self.tensors.append(replace(last, shape=shape, offset=offset, storage_bytes=self._storage(views, shape)))
        self._known[indices] = len(self.tensors) - 1
        return len(self.tensors) - 1

    def _storage(self, views: Sequence[Tensor], shape: tuple[int, ...]) -> int:
        """Storage bytes: in proportion to the view's elements (a square mask) or to the length (its base)."""
        shares = {Fraction(v.storage_bytes * 8, max(1, v.elements * DTYPE_BITS[v.dtype])) for v in views}
        if len(shares) == 1:
            return int(shares.pop() * tensor_bytes(shape, views[-1].dtype))
        try:
            return self.number([v.storage_bytes for v in views])
        except NotAffine:
            return tensor_bytes(shape, views[-1].dtype)

    def _gemm(self, gemms: tuple[Gemm, ...]) -> Gemm:
        rows = [g.rows for g in gemms if g.rows is not None]
        if len({g.kind for g in gemms}) != 1 or len(rows) not in (0, len(gemms)):
            raise NotAffine(f"different products at one place: {[g.kind for g in gemms]}")
        batch, total = gemms[-1].batch, None
        if rows:  # busy experts saturate with the length: they are recounted from the rows, see _experts
            total = self.number(rows)
        else:
            batch = self.number([g.batch for g in gemms])
        sizes = [self.number([g.k for g in gemms]), self.number([g.n for g in gemms])]
        return replace(
            gemms[-1],
            batch=batch,
            m=self.number([g.m for g in gemms]) if total is None else -(-total // max(1, batch)),
            k=sizes[0],
            n=sizes[1],
            rows=total,
            lhs=self._operand([g.lhs for g in gemms]),
            rhs=self._operand([g.rhs for g in gemms]),
            out=self._operand([g.out for g in gemms]),
        )

    def _operand(self, indices: Sequence[int | None]) -> int | None:
        given = tuple(i for i in indices if i is not None)
        return self.tensor(given) if len(given) == len(indices) else None

    def _attention(self, ops: Sequence[Op]) -> AttentionCall | None:
        calls = [op.attention for op in ops if op.attention is not None]
        if len(calls) != len(ops):
            return None
        q, k, v, out = (self.tensor(tuple(getattr(c, name) for c in calls)) for name in ("q", "k", "v", "out"))
        return replace(calls[-1], q=q, k=k, v=v, out=out)  # pairs are recounted from the mask by the caller

    def _experts(self, ops: Sequence[Op]) -> ExpertCall | None:
        calls = [op.experts for op in ops if op.experts is not None]
        if len(calls) != len(ops):
            return None
        return replace(calls[-1], tokens=self.number([c.tokens for c in calls]))  # rows follow from the policy
