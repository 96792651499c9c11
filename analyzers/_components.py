"""Which component each parameter belongs to, decided by what reads it (see _structure.py and _labels.py).

A matrix belongs to the part its product lies in, a table to "embedding" (with whatever else makes the stream before the
first layer), a norm's weight and bias to "norm". Any other parameter goes with the nearest product that its op follows
or feeds: a bias with its matrix, attention sinks and SSM decays with the mixer, a router's correction with the router.
"attention" stands for every token mixer (linear attention, SSMs, convolutions, tables of distances). What no op reads
takes the component of the parameter in the same place of another layer, else "other". Tied parameters count once, under
"embedding" if a lookup reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from introspect.analyzers._labels import Labels
from introspect.analyzers._traffic import rows_of_tokens
from introspect.records import Parameter

Component = Literal["embedding", "lm_head", "attention", "ffn", "norm", "router", "other"]
COMPONENTS: tuple[Component, ...] = ("embedding", "lm_head", "attention", "ffn", "norm", "router", "other")
_PRIORITY: tuple[Component, ...] = ("embedding", "lm_head", "router", "attention", "ffn", "norm", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A parameter with its component. `active_share`: the part of it that one token uses, top-k of E experts, as a
    fraction; `active_known` is False where top-k could not be told and the share is a mere bound."""

    parameter: Parameter
    component: Component
    bias: bool = False
    routed: bool = False
    shared: bool = False
    active_share: tuple[int, int] = (1, 1)
    active_known: bool = True


class Components:
    """Places every parameter of a record; tied ones once, by their first path."""

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.graph = labels.graph
        self.structure = labels.structure
        self._found: dict[str, Component] = {}
        self._biases: set[str] = set()
        self._routed: dict[str, tuple[int, int] | None] = {}
        self._shared: set[str] = set()
        for i in range(len(self.graph.ops)):
            if self.graph.nature[i] == "data":
                self._read_by(i)

    def placed(self) -> Iterator[Placed]:
        """Every parameter once, in definition order."""
        for parameter in self.graph.trace.parameters:
            if parameter.buffer or parameter.tied_to is not None:
                continue
            path = parameter.path
            component = self._found.get(path) or self._like_other_layers(path)
            yield Placed(
                parameter=parameter,
                component=component,
                bias=path in self._biases,
                routed=path in self._routed,
                shared=path in self._shared and component == "ffn",  # a norm behind the expert is none of it
                active_share=self._routed.get(path) or (1, 1),
                active_known=self._routed.get(path, (1, 1)) is not None,
            )

    @cached_property
    def _patterns(self) -> dict[str, Component]:
        return {self.structure.layers.split(path)[0]: component for path, component in self._found.items()}

    def _like_other_layers(self, path: str) -> Component:
        return self._patterns.get(self.structure.layers.split(path)[0], "other")

    def _read_by(self, i: int) -> None:
        op, structure = self.graph.ops[i], self.structure
        matrices = structure.matrices.get(i, frozenset())
        others = {p for slot in range(len(op.inputs)) for p in self.graph.input_weights(i, slot)} - matrices
        if not (matrices or others):
            return
        component = self._component_of(i)
        for path in matrices | others:
            self._place(path, component)
        if i in structure.experts:
            call = op.experts
            share = (rows_of_tokens(call), call.tokens * call.experts) if call and call.top_k else None
            self._routed |= dict.fromkeys(matrices | others, share)
        if i in structure.shared_experts and self._is_chained(i):
            self._shared |= matrices | others
        if op.gemms or self.labels.kind.get(i) == "bias":
            self._biases |= others

    def _place(self, path: str, component: Component) -> None:
        """The first of _PRIORITY wins where several ops read one parameter (a tied table is a lookup and a head)."""
        known = self._found.get(path)
        if known is None or _PRIORITY.index(component) < _PRIORITY.index(known):
            self._found[path] = component

    def _component_of(self, i: int) -> Component:
        structure = self.structure
        if self.graph.ops[i].kind == "lookup":
            return "embedding" if self._feeds_products(i) else "attention"
        if self.labels.kind.get(i) == "norm":
            return "norm"
        if i in structure.heads:
            return "lm_head"
        if i in structure.router:
            return "router"
        if i in structure.mixers:
            return "attention"
        if i in structure.ffn:
            return "ffn"
        if i in structure.matrices:
            return "embedding" if structure.enters(i) else "other"
        return self._near_product(i)

    def _feeds_products(self, i: int) -> bool:
        """False for a table of distances: what it gives meets attention scores and no weight product before them."""
        graph, structure = self.graph, self.structure
        after = graph.ahead([i], lambda j: structure.core[j])
        cores = {j for k in after for j in graph.consumers[k] if structure.core[j]}
        return not cores or not cores.isdisjoint(structure.matrices)

    def _near_product(self, i: int) -> Component:
        """The component of the product that op i follows, else of the one it leads to."""
        structure, matrices = self.structure, self.structure.matrices.keys()
        if structure.stream[i]:
            return self._of_stream(i)
        for reach in (self.graph.back, self.graph.ahead):
            products = sorted((reach([i], structure.in_stream) & matrices) - {i}, key=lambda j: abs(j - i))
            if products:
                return self._component_of(products[0])
        return "other"

    def _of_stream(self, i: int) -> Component:
        """Of what scales or shifts the stream: part of the entrance before the first layer; the component that alone
        reads the result (RWKV's token shift); else "other"."""
        graph, structure = self.graph, self.structure
        if structure.enters(i):
            return "embedding"
        near = graph.ahead([i], lambda j: structure.core[j] or j in structure.residual_adds)
        readers = {j for k in near for j in graph.consumers[k] if j in structure.matrices}
        components = {self._component_of(j) for j in readers}
        return components.pop() if len(components) == 1 else "other"

    def _is_chained(self, i: int) -> bool:
        """Whether product i of the shared part feeds or follows another one: a lone gate is no expert."""
        shared = self.structure.shared_experts & self.structure.matrices.keys()
        near = self.graph.ahead([i], self.structure.in_stream) | self.graph.back([i], self.structure.in_stream)
        return bool((near & shared) - {i})
