"""How each layer knows positions, named from the graph.

rope: queries pass a cosine, a sine or a fixed table of them (a buffer, or a parameter without gradient that positions
are looked up in) between their weight product and the attention; alibi: the scores get a term that powers of a slope
went into; relative: one that was looked up in a parameter; learned and sinusoidal: rows of a parameter or of a fixed
table, looked up by positions and not by token ids or cut out in order, are added to the residual stream, for all layers
alike; none: nothing of the kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from introspect.analyzers._folding import Layer, layer_ranges
from introspect.analyzers._structure import Structure
from introspect.graph import base_name
from introspect.records import Rope

_ANGLES = frozenset({"cos", "sin", "polar"})
_LOOKUPS = frozenset({"lookup", "gather"})
_SOFTMAX = frozenset({"softmax", "_softmax"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPosition:
    """One attention call: its layer, how it knows positions, and the buffers that rotate its queries."""

    layer: Layer
    kinds: tuple[str, ...]
    buffers: frozenset[str]


class Positions:
    """The position encodings of one record."""

    def __init__(self, structure: Structure) -> None:
        self.structure, self.graph = structure, structure.graph
        parameters = self.graph.trace.parameters
        trained = any(not p.buffer and not p.frozen for p in parameters)  # else freezing says nothing about a table
        self.tables = frozenset(p.path for p in parameters if len(p.shape) > 1 and p.shape[-2] > 1)
        self.fixed = self.graph.buffers | {p.path for p in parameters if trained and p.frozen and p.path in self.tables}
        everywhere = self._embedded()
        self.layers = tuple(
            self._of_call(i, everywhere) for i, op in enumerate(self.graph.ops) if op.attention is not None
        )

    def rows(self) -> list[tuple[str, str]]:
        """(kind, layers) of layers that are alike, in order of first appearance; what mixes without attention: none."""
        found: defaultdict[str, list[Layer]] = defaultdict(list)
        for layer in self.layers:
            found[" + ".join(layer.kinds)].append(layer.layer)
        attending = {layer.layer for layer in self.layers}
        mixing = {self.structure.layers.split(self.graph.ops[i].module)[1]: None for i in sorted(self.structure.mixers)}
        for own in mixing:
            if own and own not in attending:
                found["none"].append(own)
        return [(kind, layer_ranges(layers)) for kind, layers in found.items()]

    def layers_of(self, rope: Rope) -> str:
        """Layers whose queries one set of frequencies rotates, as ranges; by the buffer that holds them."""
        own = [layer for layer in self.layers if any(_is_of(rope, path) for path in layer.buffers)]
        return layer_ranges(layer.layer for layer in own)

    def _of_call(self, i: int, everywhere: frozenset[str]) -> LayerPosition:
        op = self.graph.ops[i]
        assert op.attention is not None
        names, buffers = self._ancestry(i, [op.attention.q])
        kinds = {"rope"} if names & _ANGLES or buffers else set()
        bias_names, lookups = self._bias(i)
        if "pow" in bias_names:
            kinds.add("alibi")
        elif lookups:
            kinds.add("relative")
        layer = self.structure.layers.split(op.module)[1]
        return LayerPosition(layer=layer, kinds=tuple(sorted(kinds | everywhere)) or ("none",), buffers=buffers)

    def _ancestry(self, i: int, tensors: Iterable[int]) -> tuple[set[str], frozenset[str]]:
        """Names of the ops that operands of op i follow from, back to products with weights, and the buffers read."""
        graph = self.graph
        waiting = [producer for t in tensors if (producer := graph.producer_of(i, t)) >= 0]
        seen: set[int] = set()
        names: set[str] = set()
        buffers: set[str] = set()
        while waiting:
            j = waiting.pop()
            if j in seen or (graph.ops[j].gemms and any(graph.gemm_weights(j, gemm) for gemm in graph.ops[j].gemms)):
                continue
            seen.add(j)
            names.add(base_name(graph.ops[j]))
            for slot, t in enumerate(graph.ops[j].inputs):
                path = graph.tensors[t].parameter
                if path in self.fixed and self._is_table(t):
                    buffers.add(str(path))
                waiting.append(graph.producers[j][slot])
            waiting = [p for p in waiting if p >= 0]
        return names, frozenset(buffers)

    def _bias(self, i: int) -> tuple[set[str], bool]:
        """What is added to the scores of attention op i: names of the ops it follows from, and whether looked up."""
        graph = self.graph
        call = graph.ops[i].attention
        assert call is not None
        names: set[str] = set()
        for j in self._scores(i):
            operands = [t for t in graph.ops[j].inputs if t not in (call.q, call.k, call.v)]
            real = [t for t in operands if graph.tensors[t].dtype.startswith(("fp", "bf"))]
            constant = [t for t in real if graph.input_nature(j, graph.ops[j].inputs.index(t)) != "data"]
            looked_up = [t for t in real if self._is_lookup(j, t)]
            names |= self._ancestry(j, constant)[0]
            if looked_up:
                return names, True
        return names, False

    def _scores(self, i: int) -> list[int]:
        """The op itself and, where attention is no single op, the element-wise ops between it and the softmax."""
        graph, found = self.graph, [i]
        if len(graph.ops[i].gemms) > 1:
            return found
        waiting = list(graph.consumers[i])
        while waiting:
            j = waiting.pop()
            op = graph.ops[j]
            if j not in found and not op.gemms and base_name(op) not in _SOFTMAX and op.kind in ("elementwise", "cast"):
                found.append(j)
                waiting.extend(graph.consumers[j])
        return found

    def _is_lookup(self, j: int, t: int) -> bool:
        graph = self.graph
        near = graph.back([graph.producer_of(j, t)], lambda p: bool(graph.ops[p].gemms))
        return any(graph.ops[p].kind in _LOOKUPS for p in near) and not any(
            self.structure.in_stream(p) for p in near if graph.ops[p].kind not in _LOOKUPS
        )

    def _embedded(self) -> frozenset[str]:
        """Tables that positions are looked up in, or that are cut to their number, for the stream itself."""
        graph, found = self.graph, set()
        for i, op in enumerate(graph.ops):
            if op.kind in _LOOKUPS and self._joins_stream(i):
                tables = [graph.tensors[t].parameter for t in op.inputs if self._is_table(t)]
                indices = [t for t in op.inputs if graph.tensors[t].role == "index" or "int" in graph.tensors[t].dtype]
                if tables and indices and all(self._is_position(i, t) for t in indices):
                    found.add(self._kind_of(tables[0]))
            elif base_name(op) == "add" and self.structure.in_stream(i):
                rows = graph.tensors[op.outputs[0]].shape[-2:]
                cut = [graph.tensors[t] for t in op.inputs if self._is_table(t)]
                found |= {
                    self._kind_of(view.parameter)
                    for view in cut
                    if view.parameter in self.tables and view.shape[-2:] == rows
                }
        return frozenset(found)

    def _kind_of(self, table: str | None) -> str:
        return "sinusoidal" if table in self.fixed else "learned"

    def _is_table(self, t: int) -> bool:
        """Whether a tensor is a parameter or buffer of real numbers."""
        tensor = self.graph.tensors[t]
        return tensor.parameter is not None and tensor.dtype.startswith(("fp", "bf", "complex"))

    def _joins_stream(self, i: int) -> bool:
        """Whether looked-up rows are added to the stream, moved, normed or scaled by a constant on the way."""
        graph, waiting, seen = self.graph, list(self.graph.consumers[i]), set()
        while waiting:
            j = waiting.pop()
            if j in seen or graph.ops[j].gemms:
                continue
            seen.add(j)
            others = [p for p in graph.data_producers(j) if p != i and p not in seen]
            if not others:
                waiting += graph.consumers[j]
            elif base_name(graph.ops[j]) == "add" and self.structure.in_stream(j):
                return True
        return False

    def _is_position(self, i: int, t: int) -> bool:
        """Whether indices count something instead of naming tokens: they follow from a range or a running sum."""
        producer = self.graph.producer_of(i, t)
        if producer < 0:
            return self.graph.tensors[t].parameter in self.graph.buffers
        names, _ = self._ancestry(i, [t])
        return bool(names & {"arange", "cumsum"})


def _is_of(rope: Rope, buffer: str) -> bool:
    """Whether a buffer holds these frequencies: it is the module's own, and of its layer type where it has several."""
    return buffer.startswith(f"{rope.module}.") and (rope.layer_type is None or rope.layer_type in buffer)
