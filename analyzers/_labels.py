"""What the ops without products are: primitive ops joined into norms, rotations, activations and so on, by dataflow.

- setup: follows from positions and sizes alone (masks, rotary tables). weights: follows from parameters alone.
- norm: a fused norm op, or a mean (variance, vector norm) over a row, what is made of that one number a row, the ops
  that scale the row by it, and the weight and bias applied to the result.
- rope: two products of data with position constants, summed; with the swap of halves before and the joins after it.
- residual: an add into the stream (see _structure.py). bias: a parameter added to a product.
- activation: element-wise ops around a nonlinearity between two products, the gate's multiplication included.
- routing: what else lies between the stream and the experts. scan: ops of a folded loop.
- lookup, softmax, topk, cache_write and all the rest keep the kind they were recorded with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

from introspect.analyzers._structure import Structure
from introspect.graph import base_name

_STATISTICS = frozenset({"mean", "var", "var_mean", "std", "std_mean", "linalg_vector_norm", "norm"})
_ROOTS = frozenset({"rsqrt", "pow", "sqrt", "reciprocal", "clamp_min", "clamp", "maximum", "div"})
_JOINS = frozenset({"cat", "stack"})
_SWAPS = frozenset({"cat", "stack", "neg", "flip", "roll"})
_OWN_KINDS = frozenset({"lookup", "cache_write", "softmax", "topk", "loss", "collective", "random"})
_POINTWISE = ("elementwise", "activation", "cast")


class Labels:
    """`kind` and `group` (its first op) of every forward op that computes and holds no product, by position."""

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self.graph = structure.graph
        self.kind: dict[int, str] = {}
        self._parent: dict[int, int] = {}
        ops = self.graph.ops
        self.rest = {i for i, op in enumerate(ops) if not op.gemms and op.kind != "scalar" and not self.graph.views[i]}
        for i in sorted(self.rest):
            op = ops[i]
            if self.graph.nature[i] != "data":
                self._name((i,), "weights" if self.graph.nature[i] == "weight" else "setup")
            elif op.kind in _OWN_KINDS:
                self._name((i,), op.kind)
            elif self.graph.repeated[i]:
                self._name((i,), "scan")
        self._find_norms()
        self._find_rotations()
        for i in sorted(structure.residual_adds & self.rest):
            self._name((i,), "residual")
        self._find_biases()
        self._find_activations()
        for part in self._parts(i for i in structure.dispatch - structure.shared_experts if self._free(i)):
            self._name(part, "routing")
        for i in sorted(self.rest):
            self._name((i,), ops[i].kind)

    def groups(self) -> dict[int, list[int]]:
        """Ops of each group, by its first op."""
        found: dict[int, list[int]] = {}
        for i in sorted(self.kind):
            found.setdefault(self._root(i), []).append(i)
        return found

    def _name(self, ops: Iterable[int], kind: str) -> None:
        """Give ops that have no name yet this one, as one group."""
        fresh = [i for i in ops if i in self.rest and i not in self.kind]
        for i in fresh:
            self.kind[i] = kind
            self._join(fresh[0], i)

    def _join(self, a: int, b: int) -> None:
        first, second = sorted((self._root(a), self._root(b)))
        self._parent[second] = first

    def _root(self, i: int) -> int:
        while (up := self._parent.get(i, i)) != i:
            i = up
        return i

    def _free(self, i: int) -> bool:
        return i in self.rest and i not in self.kind

    def _elements(self, i: int) -> int:
        return self.graph.tensors[self.graph.ops[i].outputs[0]].elements

    def _weighted(self, i: int) -> bool:
        """Whether op i combines data with a parameter (as it is, cast or shifted)."""
        return any(self.graph.input_nature(i, slot) == "weight" for slot in range(len(self.graph.ops[i].inputs)))

    # --- norms ------------------------------------------------------------------------------------------------------

    def _find_norms(self) -> None:
        for i in sorted(self.rest):
            op = self.graph.ops[i]
            if op.kind == "norm":
                self._name((i,), "norm")
            elif op.kind == "reduction" and base_name(op) in _STATISTICS and self._free(i):
                self._name(self._norm_around(i), "norm")

    def _norm_around(self, statistic: int) -> list[int]:
        """All ops of the norm that this row statistic belongs to; empty when it scales nothing."""
        graph, rows = self.graph, self._elements(statistic)
        found = self._row_statistics(statistic, rows) | {statistic}
        row = {self._row_of(i, slot) for i in found for slot in range(len(graph.ops[i].inputs))}
        scaled, rooted = set[int](), base_name(graph.ops[statistic]) in ("std", "linalg_vector_norm")
        waiting = [statistic]
        while waiting:
            for j in graph.consumers[waiting.pop()]:
                if not self._free(j) or graph.ops[j].kind not in _POINTWISE or j in found:
                    continue
                if self._elements(j) <= rows:
                    found.add(j)
                    waiting.append(j)
                    rooted = rooted or base_name(graph.ops[j]) in _ROOTS
                elif any(self._row_of(j, slot) in row for slot in range(len(graph.ops[j].inputs))):
                    scaled.add(j)
        if not (rooted and scaled):
            return []
        centred = {p for j in scaled for p in graph.data_producers(j) if self._centres(p)}
        found |= scaled | centred | {p for j in centred for p in graph.data_producers(j) if self._is_mean(p)}
        last = max(scaled)
        while (step := self._norm_tail(last)) is not None:
            found.add(step)
            last = step
        return sorted(found)

    def _row_of(self, i: int, slot: int) -> tuple[int, int]:
        """Which row an operand is, casts and centring apart: its producer and storage."""
        graph = self.graph
        producer, tensor = graph.producers[i][slot], graph.tensors[graph.ops[i].inputs[slot]]
        if producer >= 0 and (graph.ops[producer].kind == "cast" or self._centres(producer)):
            return self._row_of(producer, 0)
        return producer, tensor.storage

    def _row_statistics(self, statistic: int, rows: int) -> set[int]:
        """Squares, centring and the cast that only serve the statistic and the scaling."""
        found: set[int] = set()
        waiting = list(self.graph.data_producers(statistic))
        while waiting:
            j = waiting.pop()
            if not self._free(j) or j in found:
                continue
            name = base_name(self.graph.ops[j])
            if name in ("pow", "square", "abs") or self._centres(j) or (name == "mean" and self._elements(j) <= rows):
                found.add(j)
                waiting += self.graph.data_producers(j)
            elif self.graph.ops[j].kind == "cast":
                found.add(j)
        return found

    def _centres(self, i: int) -> bool:
        """Whether op i subtracts a mean."""
        return base_name(self.graph.ops[i]) == "sub" and any(map(self._is_mean, self.graph.data_producers(i)))

    def _is_mean(self, i: int) -> bool:
        return base_name(self.graph.ops[i]) == "mean"

    def _norm_tail(self, last: int) -> int | None:
        """The cast, the weight or the bias that a normalised row goes through next."""
        following = [j for j in set(self.graph.consumers[last]) if self._free(j)]
        if len(set(self.graph.consumers[last])) != 1 or not following:
            return None
        (j,) = following
        op = self.graph.ops[j]
        scales = op.kind == "elementwise" and base_name(op) in ("mul", "add") and self._weighted(j)
        return j if op.kind == "cast" or scales else None

    # --- rotations, biases, activations -----------------------------------------------------------------------------

    def _find_rotations(self) -> None:
        for i in sorted(self.rest):
            op = self.graph.ops[i]
            if not self._free(i) or op.kind != "elementwise":
                continue
            if base_name(op) in ("add", "sub"):
                turned = [p for p in self.graph.data_producers(i) if self._times_constant(p)]
                if len(turned) == 2:
                    self._rotate([i, *turned])
            elif self._times_constant(i) and self.graph.tensors[op.outputs[0]].dtype.startswith("complex"):
                self._rotate([i])
        for i in sorted(self.kind):
            if self.kind[i] == "rope":
                self._join_halves(i)

    def _times_constant(self, i: int) -> bool:
        """A product of data with a constant that varies along its last axis."""
        op = self.graph.ops[i]
        if base_name(op) != "mul" or not (self._free(i) or self.kind.get(i) == "rope"):
            return False
        constants = [
            self.graph.tensors[t] for slot, t in enumerate(op.inputs) if self.graph.input_nature(i, slot) == "constant"
        ]
        return len(op.inputs) == 2 and any(t.shape[-1:] > (1,) for t in constants)

    def _rotate(self, ops: list[int]) -> None:
        before: list[int] = []
        waiting = [p for i in ops for p in self.graph.data_producers(i)]
        while waiting:
            p = waiting.pop()
            swaps = base_name(self.graph.ops[p]) in _SWAPS or self.graph.ops[p].kind == "cast"
            if self._free(p) and swaps and p not in before:
                before.append(p)
                waiting += self.graph.data_producers(p)
        self._name((*ops, *before), "rope")
        for i in (*ops, *before):
            if self.kind.get(i) == "rope":
                self._join(ops[0], i)

    def _join_halves(self, i: int) -> None:
        """The concatenation after a rotation, and the cast back."""
        for j in self.graph.consumers[i]:
            joins = base_name(self.graph.ops[j]) in _JOINS or self.graph.ops[j].kind == "cast"
            if self._free(j) and joins:
                self._name((j,), "rope")
            if self.kind.get(j) == "rope":
                self._join(i, j)

    def _find_biases(self) -> None:
        for i in sorted(self.rest):
            if self._free(i) and base_name(self.graph.ops[i]) == "add" and self._weighted(i):
                follows = any(p in self.structure.matrices for p in self.graph.data_producers(i))
                self._name((i,) if follows else (), "bias")

    def _find_activations(self) -> None:
        """Connected element-wise ops outside the router; those with a nonlinearity or a gate are one activation."""
        free = [i for i in self.rest if self._free(i) and self.graph.ops[i].kind in _POINTWISE]
        for part in self._parts(i for i in free if i not in self.structure.router):
            if any(map(self._is_activation, part)):
                self._name(part, "activation")

    def _parts(self, ops: Iterable[int]) -> Iterator[list[int]]:
        """Connected parts of these ops, in order. Ops are joined only where equally many products lie behind them, so
        that no part waits for its own result."""
        stages: dict[int, set[int]] = {}
        for i in sorted(ops):
            stages.setdefault(self._depths[i], set()).add(i)
        left = {i for stage in stages.values() for i in stage}
        for i in sorted(left):
            if i in left:
                part = self._connected(i, stages[self._depths[i]])
                left -= part
                yield sorted(part)

    def _is_activation(self, i: int) -> bool:
        op = self.graph.ops[i]
        gates = base_name(op) == "mul" and any(self.kind.get(p) == "activation" for p in self.graph.data_producers(i))
        return op.kind == "activation" or gates

    @cached_property
    def _depths(self) -> list[int]:
        """How many products lie behind each op on its longest way."""
        core, depths = self.structure.core, list[int]()
        for i in range(len(self.graph.ops)):
            depths.append(max((depths[p] + core[p] for p in self.graph.producers[i] if p >= 0), default=0))
        return depths

    def _connected(self, start: int, inside: set[int]) -> set[int]:
        part, waiting = {start}, [start]
        while waiting:
            j = waiting.pop()
            for other in (*self.graph.consumers[j], *self.graph.data_producers(j)):
                if other in inside and other not in part:
                    part.add(other)
                    waiting.append(other)
        return part
