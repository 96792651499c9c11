"""A model's parts, read from its dataflow: the residual stream, token mixers, routers, experts, FFNs, the head.

Names and configs are never asked. The rules:

- core: an op with a product, and every op of a folded scan. All else moves, scales or normalises.
- stream: what layers hand on. It starts at table lookups, at real-valued inputs and at values that skip a core and are
  added again (x + f(x)). Ops without a core keep it (norms, casts, gates); so does adding anything to it, and mixing
  copies of it within a token.
- mixer: what exchanges values between tokens: attention, products of two activations, convolutions along one axis,
  folded scans. Its region reaches back from its operands to the stream, and forward from its result to the next add
  into the stream; gates multiplied in on the way belong to it.
- routed experts: grouped products. Router: between the stream and the top-k whose indices reach them. Shared experts:
  chains of products whose result is added to the experts' before both enter the stream.
- head: a product after which nothing but element-wise work comes, as wide as a looked-up table is long.
- entrance: what makes the stream before the first layer (patch embeddings, projections of looked-up rows).
- FFN: every other product with weights that lies in a layer (where there are none: that ends in the stream), but no
  convolution over positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from math import prod

from introspect.analyzers._folding import LayerPaths
from introspect.graph import Graph, base_name

_ADDS = frozenset({"add", "sub"})
_CHOICES = frozenset({"topk", "argmax", "sort", "argsort", "max"})
_TABLE_SLACK = 0.1  # share of a table's rows that a head may leave out: padding (MusicGen), prompts (CPM-Ant)


class Structure:
    """The parts of one record, as sets of op positions in `graph.ops`."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.layers = LayerPaths(graph.trace.modules)
        self.core = [bool(op.gemms) or repeated for op, repeated in zip(graph.ops, graph.repeated, strict=True)]
        self.matrices: dict[int, frozenset[str]] = {}  # op with a weight product -> those weights
        for i, op in enumerate(graph.ops):
            weights = frozenset().union(*(graph.gemm_weights(i, gemm) for gemm in op.gemms))
            if weights:
                self.matrices[i] = weights
        self.residual_adds: set[int] = set()
        self.stream = self._find_stream()

    def in_stream(self, i: int) -> bool:
        """Whether op i's result is part of the residual stream."""
        return self.stream[i]

    def layer_of(self, i: int) -> str | None:
        """Path of the layer op i ran in; None outside any."""
        return self.layers.layer_path(self.graph.ops[i].module)

    # --- the stream -------------------------------------------------------------------------------------------------

    def _find_stream(self) -> list[bool]:
        graph, seeds, widths = self.graph, *self._skips()
        stream = [False] * len(graph.ops)
        for i, op in enumerate(graph.ops):
            if graph.nature[i] != "data" or op.kind == "loss":
                continue
            slots = self.graph.data_slots[i]
            inputs = [self._reads_stream(stream, i, slot) for slot in slots]
            if op.kind == "lookup" or i in seeds:
                stream[i] = True
            elif self.core[i]:
                stream[i] = any(inputs) and self._within_tokens(i)
            else:
                is_sum = self._is_sum(i) and graph.tensors[op.outputs[0]].shape[-1:] in widths
                is_scaled = any(inputs) and base_name(op) == "mul" and self._scales(stream, i, slots, inputs)
                stream[i] = bool(inputs) and (all(inputs) or is_scaled or (is_sum and any(inputs)))
            if any(inputs) and not all(inputs) and self._is_sum(i) and stream[i]:
                self.residual_adds.add(i)
        return stream

    def _within_tokens(self, i: int) -> bool:
        """A product of activations, independent for each token, none cached: mixes copies of the stream, not tokens."""
        graph, tokens = self.graph, self.graph.trace.run.tokens
        gemms = graph.ops[i].gemms
        if not gemms or i in self.matrices or any(g.kind != "einsum" or g.batch % tokens for g in gemms):
            return False
        near = graph.back(graph.data_producers(i), lambda j: self.core[j])
        return not any(graph.tensors[t].role == "cache" for j in (i, *near) for t in graph.ops[j].inputs)

    def _scales(self, stream: list[bool], i: int, slots: tuple[int, ...], in_stream: list[bool]) -> bool:
        """Whether op i scales the stream itself (hyper-connections, gated norms): the result is as large as the stream,
        and no top-k chose the factor, as it does routing weights, which scale what an expert reads."""
        graph = self.graph
        shape = graph.tensors[graph.ops[i].outputs[0]].shape
        pairs = list(zip(slots, in_stream, strict=True))
        if not any(read and graph.tensors[graph.ops[i].inputs[slot]].shape == shape for slot, read in pairs):
            return False
        factors = (graph.producers[i][slot] for slot, read in pairs if not read)
        near = graph.back(factors, lambda j: self.core[j] or stream[j])
        return not any(base_name(graph.ops[j]) in _CHOICES for j in near)

    def _skips(self) -> tuple[set[int], set[tuple[int, ...]]]:
        """Ops whose results skip a core and are added again, and the widths a stream has."""
        graph = self.graph
        spans = [
            (skipped, i) for i in range(len(graph.ops)) if self._is_sum(i) for skipped in self._skipped_producers(i)
        ]
        # A skip inside another one of the same layer (a convolution added to its input within a mixer) is no stream.
        outer = [
            (a, b)
            for a, b in spans
            if not any(a2 < a and b < b2 and self.layer_of(a) == self.layer_of(b2) for a2, b2 in spans)
        ]
        width_of = {b: graph.tensors[graph.ops[b].outputs[0]].shape[-1:] for _, b in outer}
        lookups = {graph.tensors[op.outputs[0]].shape[-1:] for op in graph.ops if op.kind == "lookup"}
        usual = Counter(width_of.values()).most_common(1)
        widths = lookups | {width for width, _ in usual} if lookups else set(width_of.values())
        return {a for a, b in outer if width_of[b] in widths}, widths

    def _skipped_producers(self, i: int) -> Iterator[int]:
        """The operand of sum i that the other operand follows from over a core."""
        first, second = sorted(self.graph.producers[i][slot] for slot in self.graph.data_slots[i])
        if 0 <= first < second:
            between = self.graph.back([second], lambda j: j < first)
            if first in between and any(self.core[j] for j in between if j != first):
                yield first

    def _is_sum(self, i: int) -> bool:
        graph, op = self.graph, self.graph.ops[i]
        if base_name(op) not in _ADDS or op.gemms or graph.nature[i] != "data":
            return False
        shapes = {graph.tensors[op.inputs[slot]].shape for slot in self.graph.data_slots[i]}
        return len(self.graph.data_slots[i]) == 2 and shapes == {graph.tensors[op.outputs[0]].shape}

    def _reads_stream(self, stream: list[bool], i: int, slot: int) -> bool:
        producer = self.graph.producers[i][slot]
        if producer >= 0:
            return stream[producer]
        return self.graph.tensors[self.graph.ops[i].inputs[slot]].role == "activation"

    # --- parts ------------------------------------------------------------------------------------------------------

    @cached_property
    def experts(self) -> set[int]:
        """Grouped products."""
        return {i for i, op in enumerate(self.graph.ops) if op.experts or any(g.kind == "grouped" for g in op.gemms)}

    @cached_property
    def dispatch(self) -> set[int]:
        """All ops between the stream and the experts, the router's included, and back to the stream."""
        after = self._after(self.experts)
        return self._before(self.experts) | after | self._beside(after)

    @cached_property
    def router(self) -> set[int]:
        """Ops between the stream and the choice (top-k, argmax) of the experts, or the weights of their results."""
        graph = self.graph
        choices = {i for i in self._before(self.experts) if base_name(graph.ops[i]) in _CHOICES}
        unmerged = graph.ahead(
            (j for i in self.experts for j in graph.consumers[i]),
            lambda j: self.stream[j] or base_name(graph.ops[j]) in _ADDS or graph.ops[j].attention is not None,
        )
        return (self._before(choices) | self._beside(unmerged)) - self.experts

    @cached_property
    def shared_experts(self) -> set[int]:
        """Ops of the chains whose results are added to the routed experts'."""
        after, found = self._after(self.experts), set()
        for i in after:
            if base_name(self.graph.ops[i]) in _ADDS:
                beside = [p for p in self.graph.data_producers(i) if p not in after and not self.stream[p]]
                found |= self.graph.back(beside, lambda j: self.stream[j] or j in after)
        return found - self.router - self.experts - self.mixers

    @cached_property
    def mixers(self) -> set[int]:
        """Ops of token mixers: from the stream to the mixing ops, and from those to the add into the stream."""
        routed = self._after(self.experts)
        alone = {
            i for i in routed if self.core[i] and self._mixes(i)
        }  # a convolution of what experts gave mixes, they do not
        ends = {*self._mixing_ops, *(self._cache_writes - routed)}
        return alone | ends | self._before(ends) | self.mixed | self._beside(self.mixed)

    @cached_property
    def _cache_writes(self) -> set[int]:
        """Ops that put something into the cache: only mixers do."""
        graph = self.graph
        return {
            i
            for i, op in enumerate(graph.ops)
            if not graph.views[i] and any(graph.tensors[t].role == "cache" for t in op.outputs)
        }

    @cached_property
    def mixed(self) -> set[int]:
        """Ops that follow from a mixing op, up to the add into the stream."""
        found: set[int] = set()
        for core in self._mixing_ops:
            if core not in found:
                found |= self._after([core], through=self._reaches_stream(core))
        return found

    @cached_property
    def _mixing_ops(self) -> list[int]:
        routed = self._after(self.experts)
        attention = {i for i in routed if self.graph.ops[i].attention is not None}  # experts may make its queries
        beyond = routed - attention
        return [i for i, core in enumerate(self.core) if core and i not in beyond and self._mixes(i)]

    def _mixes(self, i: int) -> bool:
        op, graph = self.graph.ops[i], self.graph
        if op.attention is not None or graph.repeated[i]:
            return graph.nature[i] == "data"
        for gemm in op.gemms:
            if gemm.kind in ("attention_qk", "attention_pv", "scan"):
                return True
            if gemm.kind == "einsum" and not graph.gemm_weights(i, gemm) and graph.gemm_reads_data(i, gemm):
                return not self._within_tokens(i)
        return self._is_convolution(i, axes=1) and self.layer_of(i) is not None

    def _is_convolution(self, i: int, axes: int | None = None) -> bool:
        """Whether op i convolves over neighbouring positions, along this many axes (None: any number)."""
        kernels = [
            self.graph.tensors[gemm.rhs].shape[2:]
            for gemm in self.graph.ops[i].gemms
            if gemm.kind == "conv" and gemm.rhs is not None
        ]
        return any(prod(kernel) > 1 and axes in (None, len(kernel)) for kernel in kernels)

    @cached_property
    def heads(self) -> set[int]:
        """Products whose result is the logits."""
        graph = self.graph
        tables = [graph.tensors[op.inputs[0]].shape[0] for op in graph.ops if op.kind == "lookup"]
        found = set()
        for i in self.matrices:
            gemm = graph.ops[i].gemms[0]
            if any(abs(gemm.n - rows) <= _TABLE_SLACK * rows for rows in tables) and self.layer_of(i) is None:
                after = graph.ahead(graph.consumers[i], lambda j: False)
                if not any(self.core[j] or j in self.residual_adds for j in after):
                    found.add(i)
        return found

    def enters(self, i: int) -> bool:
        """Whether op i comes before the first layer's first op."""
        return i < self._first_layer_op

    @cached_property
    def _first_layer_op(self) -> int:
        positions = (i for i in range(len(self.graph.ops)) if self.layer_of(i) is not None)
        return next((i for i in positions if self.graph.nature[i] == "data"), 0)

    @cached_property
    def ffn(self) -> set[int]:
        """Weight products of feed-forward blocks, experts included."""
        taken = self.mixers | self.router | self.heads
        rest = [i for i in self.matrices if i not in taken and not self.enters(i) and not self._is_convolution(i)]
        layered = self._first_layer_op > 0
        return {i for i in rest if self.layer_of(i) is not None or (not layered and self._reaches_stream(i))}

    # --- reach ------------------------------------------------------------------------------------------------------

    def _before(self, ops: Iterable[int]) -> set[int]:
        """Ops from the stream up to these, these excluded unless one feeds another."""
        return self.graph.back((p for i in ops for p in self.graph.data_producers(i)), self.in_stream)

    def _after(self, ops: Iterable[int], through: bool = True) -> set[int]:
        """Ops from these to the stream. `through`: over weight products too, else up to the first of them."""
        starts = [j for i in ops for j in self.graph.consumers[i]]
        if through:
            return self.graph.ahead(starts, self.in_stream)
        first = self.graph.ahead(starts, lambda j: self.stream[j] or j in self.matrices)
        return first | {j for i in (*first, *ops) for j in self.graph.consumers[i] if j in self.matrices}

    def _beside(self, after: set[int]) -> set[int]:
        """What enters these ops from the side other than by an add: gates, routing weights, permutations."""
        sides = {
            p
            for i in after
            if base_name(self.graph.ops[i]) not in _ADDS and i not in self.experts
            for p in self.graph.data_producers(i)
        }
        return self.graph.back(sides - after, lambda j: self.stream[j] or j in after or j in self.experts)

    def _reaches_stream(self, i: int) -> bool:
        after = self.graph.ahead([i], self.in_stream)
        return any(self.stream[j] for k in after for j in self.graph.consumers[k])
