"""How a Megatron-style engine cuts the weights of any model, decided from the dataflow of an unsharded record.

- Column, then row, by the state of what a product reads (_placement.py). Whole on every rank: routers, projections
  into a latent, what only chooses keys (sparse-attention indexers), a product that no row product follows, and in a
  mixer one with fewer columns than ranks. Norms are whole where they read whole values.
- Heads stay whole. Where there are fewer KV heads than ranks, each is held by several; the projections of keys and
  values are found by walking back from the attention call.
- A fused result (query with key and value, gate with up) is cut inside each part.
- The table of token ids and the head are cut by vocabulary, padded to equal parts.
- Routed experts: each is cut like an FFN, or (EP) held whole by one of `ep` ranks.

N ranks must divide the query heads and FFN widths and divide, or be a multiple of, the KV heads. A part of a recurrent
mixer that does not divide stays whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from introspect.analyzers._cuts import Cut, Limit, WeightCut, even
from introspect.analyzers._latent import nearest_cores
from introspect.analyzers._placement import Placement, State, Weighing
from introspect.analyzers._products import Product
from introspect.analyzers._structure import Structure
from introspect.graph import base_name
from introspect.records import AttentionCall, CacheTensor, ExpertCall, Gemm, Tensor

_CHOICES = frozenset({"topk", "argsort", "sort"})
_COUNTS = frozenset({"arange", "cumsum"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Ranks: `tp` share a batch, `ep` (a multiple of tp) the experts. The vocabulary is padded to equal parts that are
    multiples of `vocabulary_multiple`."""

    tp: int = 1
    ep: int = 1
    vocabulary_multiple: int = 1


class Megatron:
    """The cuts of every weight and attention call. `limits` bound the degrees; `remarks` say what stays whole and why:
    reason -> modules; `repeated` are KV heads that the weights make, and to how many the code repeats them."""

    def __init__(self, structure: Structure, executed: Iterable[Product], degrees: Degrees) -> None:
        self.structure, self.graph, self.degrees = structure, structure.graph, degrees
        self.cuts: dict[str, WeightCut] = {}
        self.expert_calls: dict[str, ExpertCall] = {}  # by module, and by what a product of it is named after
        self.limits: set[Limit] = set()
        self.remarks: defaultdict[str, set[str]] = defaultdict(set)
        self.repeated: set[tuple[int, int]] = set()
        self._counts = {p.path: p.count for p in self.graph.trace.parameters}
        self._latent = {product.op for product in executed if product.parallel == "latent"}
        self.placement = Placement(structure, self, degrees.tp, degrees.ep)
        self._cut_heads: set[int] = set()  # query heads of the attention calls that are cut
        for i in self.placement.cut_ops:
            if (call := self.graph.ops[i].attention) is not None:
                self._cut_attention(i, call)
        self._gradients = {  # a gradient is as wide as the product's columns, and as its rows
            (self.graph.ops[i].module, gemm.n, gemm.k): self._cut_of(i)
            for i in structure.matrices
            for gemm in self.graph.ops[i].gemms
        }
        self._cut_modules = {self.graph.ops[i].module for i in self.placement.cut_ops}

    # --- what a rank is made of -------------------------------------------------------------------------------------

    def heads_of(self, call: AttentionCall) -> tuple[int, int]:
        """Query and KV heads of a rank; every KV head is held by at least one."""
        if call.query_heads not in self._cut_heads:
            return call.query_heads, call.kv_heads
        return max(1, call.query_heads // self.degrees.tp), max(1, call.kv_heads // self.degrees.tp)

    def cut_of(self, product: Product) -> WeightCut | None:
        """How the weight of a product (or the one whose gradient it makes) is cut; None where it is whole."""
        if product.weights:
            return self.cuts.get(product.weights[0][0].split(" (")[0])  # an engine names halves of one weight
        return self._gradients.get((product.module, product.m, product.n)) if product.direction == "dw" else None

    def cuts_activations(self, product: Product) -> bool:
        """Whether a product of two activations (in the backward: of its module) is cut."""
        if product.op >= 0:
            return product.op in self.placement.cut_ops
        return product.module in self._cut_modules

    def cache_share(self, tensor: CacheTensor) -> Fraction:
        """The part of a cached tensor that a rank holds: its KV heads (at least one), a state's heads or channels."""
        if tensor.storage is None or self.placement.states.get(tensor.storage) != "cut":
            return Fraction(1)
        heads, tp = (tensor.shape_after or (1, 1))[1], self.degrees.tp
        return Fraction(max(1, heads // tp), heads)

    # --- what the walk asks -----------------------------------------------------------------------------------------

    def lookup(self, i: int) -> Weighing:
        """By vocabulary where token ids are looked up; tables of positions are whole."""
        op = self.graph.ops[i]
        for slot, t in enumerate(op.inputs):
            for path in self.graph.input_weights(i, slot):
                rows = self.graph.tensors[t].shape[0]
                if self.degrees.tp > 1 and rows >= self.degrees.tp and not self._counts_positions(i):
                    self.cuts[path] = WeightCut(columns=self._vocabulary(rows))
                    return "vocabulary"
        return "whole"

    def product(self, i: int, state: State) -> Weighing:
        """Column, row or whole; see the module's docstring."""
        op = self.graph.ops[i]
        gemm = next(gemm for gemm in op.gemms if self.graph.gemm_weights(i, gemm))
        if i in self.structure.experts:
            return self._expert(i, gemm, state)
        if self.degrees.tp == 1:
            return "whole"
        if gemm.batch > 1:  # depthwise convolutions, matrices for each head
            return self._independent(i, gemm, state)
        if state == "cut":
            self._cut(i, WeightCut(rows=even(gemm.k, self.degrees.tp)))
            return "row"
        if i in self.structure.heads and gemm.n >= self.degrees.tp:
            self._cut(i, WeightCut(columns=self._vocabulary(gemm.n)))
            return "head"
        columns, reason = self._columns(i, gemm)
        if columns is None:
            self._keep(i, reason)
            return "whole"
        self._cut(i, WeightCut(columns=columns))
        return "column"

    def vector(self, i: int, path: str) -> bool:
        """A bias, a norm's weight or a decay is cut where it has a number for every channel (or head) of the value."""
        count = self._counts[path]
        tensor = self.graph.tensors[self.graph.ops[i].outputs[0]]
        if path in self.cuts or count * self.graph.trace.run.tokens != tensor.elements:
            return path in self.cuts
        made = nearest_cores(self.structure, i, self.graph.ops[i].inputs[0]) & self.structure.matrices.keys()
        columns = {self._cut_of(j).columns for j in made} - {None}
        like = columns.pop() if len(columns) == 1 else None
        self.cuts[path] = WeightCut(columns=like if like and like.whole == count else even(count, self.degrees.tp))
        return True

    def exchange_bytes(self, i: int) -> int:
        """The rows of this rank's tokens: one for each expert a token goes to, as wide as its input or its result."""
        gemm = self.graph.ops[i].gemms[0]
        call = self.graph.ops[i].experts
        assert call is not None
        pairs = call.tokens * call.top_k or sum(call.rows)
        bits = self.graph.tensors[self.graph.ops[i].outputs[0]].bits
        width = gemm.k if self._starts_experts(i) else gemm.n
        return pairs * width * bits // 8 // self.degrees.tp

    # --- weights ----------------------------------------------------------------------------------------------------

    def _expert(self, i: int, gemm: Gemm, state: State) -> Weighing:
        call, tp, ep = self.graph.ops[i].experts, self.degrees.tp, self.degrees.ep
        if ep > 1 and call is not None:
            self._limit("experts", i, call.experts, degree="ep")
            names = (path.removesuffix(".weight") for path in self.structure.matrices[i])
            self.expert_calls |= dict.fromkeys((self.graph.ops[i].module, *names), call)
            self._cut(i, WeightCut(groups=even(call.experts, ep)))
            if state != "routed" and self._starts_experts(i):
                return "dispatch"
            return "experts" if self._leads_to_experts(i) else "combine"
        if tp == 1:
            return "whole"
        if state == "cut":
            self._cut(i, WeightCut(rows=even(gemm.k, tp)))
            return "row"
        self._cut(i, WeightCut(columns=self._parts(i, gemm)))
        return "column"

    def _independent(self, i: int, gemm: Gemm, state: State) -> Weighing:
        """Products that do not mix: each rank takes its own of them, those of its channels where the data is cut."""
        held = sum(self._counts[path] for path in self.structure.matrices[i])
        if gemm.batch % self.degrees.tp or held != gemm.batch * gemm.k * gemm.n:  # the latter: one matrix for all
            self._keep(i, "independent products that do not divide")
            return "whole"
        if state != "cut" and (gemm.kind == "conv" or self._is_lone(i)):
            self._keep(i, "no row product follows")
            return "whole"
        self._cut(i, WeightCut(groups=even(gemm.batch, self.degrees.tp)))
        return "channels"

    def _columns(self, i: int, gemm: Gemm) -> tuple[Cut | None, str]:
        """How the result of a product of whole data is cut; None and the reason where it is not."""
        if i in self.structure.router:
            return None, "router"
        if i in self._latent or self._feeds_product(i):
            return None, "projects into a latent"
        if i in self._choosing:
            return None, "chooses keys"
        if gemm.kind == "conv":
            return None, "convolution over all channels"
        if self.structure.layer_of(i) is None:
            return None, "outside the layers"
        if self._is_lone(i):
            return None, "no row product follows"
        if i in self._attended:
            return self._heads(i, gemm)
        if gemm.n < self.degrees.tp and i in self.structure.mixers:  # heads and an FFN's columns must divide instead
            return None, "fewer columns than ranks"
        return self._parts(i, gemm), ""

    def _heads(self, i: int, gemm: Gemm) -> tuple[Cut | None, str]:
        """Columns of a product that makes queries, keys or values: whole heads, at least one KV head a rank."""
        tp, (call, roles) = self.degrees.tp, self._attended[i]
        kv_width, kv_heads = self._kv_part(gemm, call, roles)
        if not kv_heads:
            return even(gemm.n, tp), ""
        if kv_heads == 1 and "q" not in roles:
            return None, "one KV head"
        self._limit("KV heads", i, kv_heads, shared=True)
        if kv_heads < call.kv_heads:
            self.repeated.add((kv_heads, call.kv_heads))
        kept = kv_width * max(1, kv_heads // tp) // kv_heads
        return Cut(whole=gemm.n, part=(gemm.n - kv_width) // tp + kept, shared=kept if kv_heads < tp else 0), ""

    def _kv_part(self, gemm: Gemm, call: AttentionCall, roles: frozenset[str]) -> tuple[int, int]:
        """Columns that make keys or values, and for how many heads."""
        tensors = self.graph.tensors
        k_width, v_width = tensors[call.q].shape[-1], tensors[call.v].shape[-1]
        if not roles & {"k", "v"}:
            return 0, 0
        if "q" not in roles:
            # Fewer columns than the call's own heads need: the model expands them before it attends.
            expanded = gemm.n < call.kv_heads * min(k_width, v_width)
            return gemm.n, gemm.n // k_width if expanded else call.kv_heads
        width = gemm.n - call.query_heads * k_width
        head = k_width * ("k" in roles) + v_width * ("v" in roles)
        return (width, width // head) if width > 0 and width % head == 0 else (0, 0)

    def _parts(self, i: int, gemm: Gemm) -> Cut:
        """Each part of a fused result in equal shares. FFN parts must divide; a recurrent mixer's may stay whole."""
        tp, widths = self.degrees.tp, self._part_widths(i, gemm.n)
        if i in self.structure.mixers:
            if any(width % tp for width in widths):
                self.remarks["parts of a mixer that do not divide"].add(self._name(i))
            whole = sum(width for width in widths if width % tp)
            return Cut(whole=gemm.n, part=whole + (gemm.n - whole) // tp, shared=whole)
        for width in widths:
            self._limit("columns", i, width)
        return Cut(whole=gemm.n, part=sum(-(-width // tp) for width in widths))

    def _part_widths(self, i: int, n: int) -> list[int]:
        """Widths of the slices that a result is taken apart into; [n] when it is not, or not along its columns."""
        out = self.graph.tensors[self.graph.ops[i].outputs[0]]
        slices = {
            (t.offset, t.shape[-1])
            for t in self._views[out.storage]
            if 0 < t.shape[-1] < n and t.elements * n == out.elements * t.shape[-1] and _rows(t) == _rows(out)
        }
        widths = [width for _, width in sorted(slices)]
        return widths if sum(widths) == n else [n]

    def _vocabulary(self, rows: int) -> Cut:
        step = self.degrees.tp * self.degrees.vocabulary_multiple
        return Cut(whole=rows, part=-(-rows // step) * self.degrees.vocabulary_multiple)

    def _cut(self, i: int, cut: WeightCut) -> None:
        """Cut the weights of product i, and a bias in the same op along with the columns."""
        matrices = self.structure.matrices[i]
        for slot in range(len(self.graph.ops[i].inputs)):
            for path in self.graph.input_weights(i, slot):
                if path in matrices or cut.columns is not None or cut.groups is not None:
                    self.cuts.setdefault(path, cut)

    def _cut_of(self, i: int) -> WeightCut:
        return next((self.cuts[path] for path in self.structure.matrices[i] if path in self.cuts), WeightCut())

    def _cut_attention(self, i: int, call: AttentionCall) -> None:
        self._limit("query heads", i, call.query_heads)
        self._cut_heads.add(call.query_heads)
        for slot, t in enumerate(self.graph.ops[i].inputs):  # attention sinks, one a head
            if self.graph.tensors[t].elements == call.query_heads:
                for path in self.graph.input_weights(i, slot):
                    self.cuts[path] = WeightCut(columns=even(call.query_heads, self.degrees.tp))

    def _limit(self, what: str, i: int, size: int, *, shared: bool = False, degree: str = "tp") -> None:
        module = self._name(i)
        self.limits.add(
            Limit(what=what, module=module, size=size, shared=shared, degree="ep" if degree == "ep" else "tp")
        )

    def _keep(self, i: int, reason: str) -> None:
        self.remarks[reason].add(self._name(i))

    def _name(self, i: int) -> str:
        return self.structure.layers.split(self.graph.ops[i].module)[0]

    # --- the graph --------------------------------------------------------------------------------------------------

    @cached_property
    def _attended(self) -> dict[int, tuple[AttentionCall, frozenset[str]]]:
        """Products that make queries, keys or values: the attention call, and which of "q", "k", "v" they make."""
        found: dict[int, tuple[AttentionCall, frozenset[str]]] = {}
        readers = self._readers
        for i, op in enumerate(self.graph.ops):
            for role in "qkv" if op.attention is not None else "":
                tensor = getattr(op.attention, role)
                reader = next((j for j in readers[tensor] if j >= i), i)
                for j in nearest_cores(self.structure, reader, tensor) & self.structure.matrices.keys():
                    call, roles = found.get(j, (op.attention, frozenset()))
                    assert call is not None
                    found[j] = (call, roles | {role})
        return found

    @cached_property
    def _stream_widths(self) -> set[int]:
        return {self.graph.tensors[self.graph.ops[i].outputs[0]].shape[-1] for i in self.structure.residual_adds}

    @cached_property
    def _readers(self) -> defaultdict[int, list[int]]:
        found: defaultdict[int, list[int]] = defaultdict(list)
        for i, op in enumerate(self.graph.ops):
            for t in op.inputs:
                found[t].append(i)
        return found

    @cached_property
    def _views(self) -> defaultdict[int, list[Tensor]]:
        found: defaultdict[int, list[Tensor]] = defaultdict(list)
        for tensor in self.graph.tensors:
            found[tensor.storage].append(tensor)
        return found

    @cached_property
    def _choosing(self) -> set[int]:
        """Ops of a mixer that lead to a choice of keys and to no attention call's operands."""
        graph, structure = self.graph, self.structure
        choices = [i for i in structure.mixers if base_name(graph.ops[i]) in _CHOICES]
        calls = [i for i, op in enumerate(graph.ops) if op.attention is not None]
        operands = [graph.producer_of(i, t) for i in calls if (c := graph.ops[i].attention) for t in (c.q, c.k, c.v)]
        before = graph.back((p for i in choices for p in graph.data_producers(i)), structure.in_stream)
        return before - graph.back(operands, structure.in_stream)

    def _is_lone(self, i: int) -> bool:
        """Whether no row product follows: the result reaches the stream by itself, or outside the mixers only products
        that do not give rows of the stream."""
        graph, structure = self.graph, self.structure
        near = graph.ahead(graph.consumers[i], lambda j: structure.core[j] or structure.stream[j])
        readers = {j for k in (i, *near) for j in graph.consumers[k]}
        if any(structure.stream[j] for j in readers):
            return True
        rows = [gemm.n for j in readers & structure.matrices.keys() for gemm in graph.ops[j].gemms]
        return i not in structure.mixers and not self._stream_widths & set(rows)

    def _feeds_product(self, i: int) -> bool:
        """Whether another product reads the result as it is: two factors of one matrix (LoRA and the like)."""
        graph = self.graph
        near = graph.ahead(graph.consumers[i], lambda j: graph.ops[j].kind not in ("copy", "cast", "layout"))
        readers = {j for k in (i, *near) for j in graph.consumers[k]}
        return any(j in self.structure.matrices and graph.ops[j].gemms[0].batch == 1 for j in readers)

    def _starts_experts(self, i: int) -> bool:
        before = self.graph.back(self.graph.data_producers(i), self.structure.in_stream)
        return not before & self.structure.experts

    def _leads_to_experts(self, i: int) -> bool:
        ahead = self.graph.ahead(self.graph.consumers[i], self.structure.in_stream)
        return bool(ahead & self.structure.experts)

    def _counts_positions(self, i: int) -> bool:
        """Whether what is looked up follows from a range, a running count or a buffer, not from token ids."""
        graph, waiting, seen = self.graph, [i], set[int]()
        while waiting:
            j = waiting.pop()
            seen.add(j)
            waiting.extend(p for p in graph.producers[j] if p >= 0 and p not in seen)
        read = {graph.tensors[t].parameter for j in seen for t in graph.ops[j].inputs}
        return bool(read & graph.buffers) or any(base_name(graph.ops[j]) in _COUNTS for j in seen)


def _rows(tensor: Tensor) -> tuple[int, ...]:
    return tensor.shape[:-1]
