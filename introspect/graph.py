"""Dataflow over a record: who wrote what an op reads, what follows from weights alone, and how values reach each other.

A view (an op of kind "layout" whose result shares its input's storage) moves nothing, so it is no producer: whoever
wrote the storage last is. An op that writes into a storage it also reads extends the chain: its own producers include
the earlier writer, so walking back through the last writer reaches them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Literal

from introspect.records import Gemm, Op, Repeat, Tensor, Trace

Nature = Literal["constant", "weight", "data"]
Where = tuple[int, int, tuple[int, ...]]  # storage, offset, shape: one value between two writes

_LOOKUPS = frozenset({"lookup", "gather"})


class Graph:
    """Producers and consumers of a trace's forward ops (`ops`; folded bodies once, `times` says how often).

    `views` says which ops only name a storage anew. `nature` of an op's result: "constant" follows from positions and
    sizes alone (masks, rotary angles), "weight" from parameters and constants (a cast or scaled weight), "data" from
    the model's inputs or cached state.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.tensors: tuple[Tensor, ...] = trace.tensors
        self.bytes = [tensor.bytes for tensor in trace.tensors]
        self.ops: list[Op] = []
        self.times: list[int] = []
        self.repeated: list[bool] = []
        for op, times, repeated in _flatten(trace.ops, 1, False):
            if not op.backward:
                self.ops.append(op)
                self.times.append(times)
                self.repeated.append(repeated)
        self.views = [self._is_view(op) for op in self.ops]
        self.buffers = frozenset(p.path for p in trace.parameters if p.buffer)
        self.producers: list[tuple[int, ...]] = []
        self.consumers: list[list[int]] = [[] for _ in self.ops]
        self.nature: list[Nature] = []
        self.data_slots: list[tuple[int, ...]] = []  # operands of each op that are data
        self._data_producers: list[tuple[int, ...]] = []
        self._weights: dict[int, frozenset[str]] = {}  # op whose nature is "weight" -> the parameters it follows from
        self._connect()

    def _connect(self) -> None:
        writer: dict[int, int] = {}
        writes = Counter(
            self.tensors[t].storage
            for op, view in zip(self.ops, self.views, strict=True)
            if not view
            for t in op.outputs
        )
        for i, op in enumerate(self.ops):
            # A factory takes shape and dtype of its operand (empty_like), not its values.
            reads = op.kind != "factory"
            producers = tuple(writer.get(self.tensors[t].storage, -1) if reads else -1 for t in op.inputs)
            self.producers.append(producers)
            if self.views[i]:
                self.nature.append("constant")  # never asked: no op has a view as its producer
                self.data_slots.append(())
                self._data_producers.append(())
                continue
            for p in set(producers):
                if p >= 0:
                    self.consumers[p].append(i)
            natures = [self.input_nature(i, slot) for slot in range(len(op.inputs))]
            self.nature.append(self._nature_of(i, op, natures))
            self.data_slots.append(tuple(slot for slot, nature in enumerate(natures) if nature == "data"))
            self._data_producers.append(tuple(producers[s] for s in self.data_slots[i] if producers[s] >= 0))
            for t in op.outputs:
                # An allocation that nobody fills stands for an input of the run, whose values are not recorded.
                if not (is_allocation(op) and writes[self.tensors[t].storage] == 1):
                    writer[self.tensors[t].storage] = i

    def _is_view(self, op: Op) -> bool:
        if op.kind != "layout" or not op.inputs:
            return False
        read = {self.tensors[t].storage for t in op.inputs}
        return all(self.tensors[t].storage in read for t in op.outputs)

    def _nature_of(self, i: int, op: Op, natures: list[Nature]) -> Nature:
        if op.kind == "factory":
            return "constant"
        if "data" in natures:
            return "data"
        if "weight" not in natures:
            return "constant"
        if op.gemms or op.kind in _LOOKUPS:
            return "data"
        self._weights[i] = frozenset().union(*(self.input_weights(i, slot) for slot in range(len(op.inputs))))
        return "weight"

    def input_nature(self, i: int, slot: int) -> Nature:
        """Nature of one operand of op i."""
        producer = self.producers[i][slot]
        if producer >= 0:
            return self.nature[producer]
        tensor = self.tensors[self.ops[i].inputs[slot]]
        if tensor.parameter is not None:
            return "constant" if tensor.parameter in self.buffers else "weight"
        if tensor.role == "cache":
            return "data"
        # An input has a batch axis; what has none is a constant kept outside the buffers (rotary frequencies).
        is_input = tensor.role == "activation" and _is_real_number(tensor.dtype) and len(tensor.shape) > 1
        return "data" if is_input else "constant"

    def input_weights(self, i: int, slot: int) -> frozenset[str]:
        """Parameters that operand follows from when its nature is "weight"; else empty."""
        producer = self.producers[i][slot]
        if producer >= 0:
            return self._weights.get(producer, frozenset())
        path = self.tensors[self.ops[i].inputs[slot]].parameter
        return frozenset() if path is None or path in self.buffers else frozenset((path,))

    def slot_of(self, i: int, tensor: int | None) -> int | None:
        """Which operand of op i this tensor is; None when it is none."""
        return self.ops[i].inputs.index(tensor) if tensor is not None and tensor in self.ops[i].inputs else None

    def gemm_weights(self, i: int, gemm: Gemm) -> frozenset[str]:
        """Parameters that are an operand of this product, as they are or cast and scaled."""
        slots = (self.slot_of(i, gemm.lhs), self.slot_of(i, gemm.rhs))
        return frozenset().union(*(self.input_weights(i, slot) for slot in slots if slot is not None))

    def gemm_reads_data(self, i: int, gemm: Gemm) -> bool:
        """False for products of constants (rotary angles as an outer product of positions and frequencies)."""
        slots = [self.slot_of(i, gemm.lhs), self.slot_of(i, gemm.rhs)]
        return any(slot is None or self.input_nature(i, slot) != "constant" for slot in slots)

    def producer_of(self, i: int, tensor: int) -> int:
        """The op that last wrote what op i reads through `tensor`; -1 when nobody did."""
        slot = self.slot_of(i, tensor)
        return -1 if slot is None else self.producers[i][slot]

    def data_producers(self, i: int) -> tuple[int, ...]:
        """Ops that wrote the data operands of op i."""
        return self._data_producers[i]

    def back(self, starts: Iterable[int], stop: Callable[[int], bool]) -> set[int]:
        """Ops whose results the starts follow from, the starts included; an op that `stop` names is not entered."""
        return self._reach(starts, self.data_producers, stop)

    def ahead(self, starts: Iterable[int], stop: Callable[[int], bool]) -> set[int]:
        """Ops that follow from the starts, the starts included; an op that `stop` names is not entered."""
        return self._reach(starts, lambda i: self.consumers[i], stop)

    @staticmethod
    def _reach(starts: Iterable[int], step: Callable[[int], Iterable[int]], stop: Callable[[int], bool]) -> set[int]:
        found: set[int] = set()
        waiting = [i for i in starts if i >= 0 and not stop(i)]
        while waiting:
            i = waiting.pop()
            if i not in found:
                found.add(i)
                waiting.extend(j for j in step(i) if j not in found and not stop(j))
        return found

    def where(self, tensor: int) -> Where:
        """The place of a view: views with equal places and no write between them are one value."""
        t = self.tensors[tensor]
        return t.storage, t.offset, t.shape


def base_name(op: Op) -> str:
    """The function's bare name: "add" for "aten.add_.Tensor" and "aten.add.Tensor"."""
    return _base(op.name)


@cache
def _base(name: str) -> str:
    parts = name.split(".")
    return (parts[1] if len(parts) > 1 else parts[0]).strip("_")


def is_allocation(op: Op) -> bool:
    """Whether an op only makes room: its result has no values."""
    return op.kind == "factory" and base_name(op).startswith(("empty", "new_empty"))


def _is_real_number(dtype: str) -> bool:
    return dtype.startswith(("fp", "bf", "complex"))


def _flatten(ops: tuple[Op | Repeat, ...], times: int, repeated: bool) -> Iterator[tuple[Op, int, bool]]:
    for op in ops:
        if isinstance(op, Repeat):
            yield from _flatten(op.body, times * op.count, True)
        else:
            yield op, times, repeated
