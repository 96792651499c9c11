"""Which values of an unsharded record each tensor-parallel rank would hold: whole, a part, or a term of a sum.

Megatron's rule (Shoeybi et al. 2019) follows from the dataflow. A product of a whole value is cut along its result
(column), one of a cut value along what it sums over (row), and its result is a term that an all-reduce must add up
before anything but sums reads it. Attention and element-wise work keep cuts. So the sums are put off as long as the
model's own arithmetic allows: a residual add may take two terms at once, and one all-reduce serves both.

This file walks the values; _megatron.py says how each weight is cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from introspect.analyzers._collectives import Transfer
from introspect.analyzers._structure import Structure
from introspect.graph import base_name
from introspect.units import tensor_bytes

_SUMS = frozenset({"add", "sub", "where", "masked_fill"})
_SCALINGS = frozenset({"mul", "div", "neg"})
_TOTALS = frozenset({"sum", "mean"})
_STATISTICS = frozenset({"mean", "var", "var_mean", "std", "linalg_vector_norm", "norm"})
_COPIES = ("copy", "cast", "layout")
_PICKS = ("gather", "scatter")


@dataclass(slots=True, eq=False)
class Term:
    """A value that is the sum of one term of each rank. `origin`: the op whose result is to be summed."""

    origin: int
    modules: tuple[str, ...]
    summed: bool = False


State = Literal["whole", "cut", "routed"] | Term
"""routed: rows that expert parallelism sent to the rank of their expert."""

Weighing = Literal["column", "row", "channels", "whole", "vocabulary", "head", "dispatch", "experts", "combine"]


class Weights(Protocol):
    """What the walk asks of whoever cuts the weights."""

    def lookup(self, i: int) -> Weighing:
        """How the table of lookup i is held: "vocabulary" or "whole"."""
        ...

    def product(self, i: int, state: State) -> Weighing:
        """How the weights of product i are cut when its data is in this state (never an open term)."""
        ...

    def vector(self, i: int, path: str) -> bool:
        """Whether a parameter that element-wise op i combines with a cut value is cut as well."""
        ...

    def exchange_bytes(self, i: int) -> int:
        """Bytes a rank sends to bring the tokens of expert product i to their ranks."""
        ...


class Placement:
    """The walk: states of all values by storage, the products and attention calls that are cut, and the transfers."""

    def __init__(self, structure: Structure, weights: Weights, tp: int, ep: int) -> None:
        self.structure, self.graph = structure, structure.graph
        self.weights, self.tp, self.ep = weights, tp, ep
        self.states: dict[int, State] = {}
        self.cut_ops: set[int] = set()
        self.transfers: list[Transfer] = []
        self._gradients: dict[int, Transfer] = {}  # by the op that made the value
        self._summed: set[str] = set()  # whole parameters whose gradients are summed
        run = self.graph.trace.run
        self.tokens, self.training = run.tokens, run.phase == "train"
        self.stream_width = stream_width(structure)
        self._parameter_bytes = {p.path: tensor_bytes(p.shape, p.dtype) for p in self.graph.trace.parameters}
        for i in range(len(self.graph.ops)):
            if self.graph.nature[i] == "data":  # views have no nature of their own
                self._visit(i)
        self.transfers += self._gradients.values()

    # --- states -----------------------------------------------------------------------------------------------------

    def state(self, tensor: int) -> State | None:
        """State of a value; None for one that nobody wrote (inputs, constants, what was cached before)."""
        found = self.states.get(self.graph.tensors[tensor].storage)
        return "whole" if isinstance(found, Term) and found.summed else found

    def _operands(self, i: int) -> dict[int, State]:
        """States of the data operands of op i, by slot; indices have none."""
        graph, found = self.graph, {}
        for slot, t in enumerate(graph.ops[i].inputs):
            is_number = graph.tensors[t].dtype.startswith(("fp", "bf", "complex"))
            if is_number and graph.input_nature(i, slot) == "data" and (state := self.state(t)) is not None:
                found[slot] = state
        return found

    def _put(self, i: int, state: State) -> None:
        if state == "cut" and self.structure.stream[i]:  # every layer reads the stream whole
            self.cut_ops.add(i)
            self._send("all_gather", i, self._bytes(i))
            state = "whole"
        for t in self.graph.ops[i].outputs:
            storage = self.graph.tensors[t].storage
            before = self.states.get(storage)
            keeps = before == "cut" and state == "whole"  # a whole part written into a cut value (keys of an MLA)
            self.states[storage] = before if keeps and before is not None else state
        if self.states[self.graph.tensors[self.graph.ops[i].outputs[0]].storage] == "cut":
            self.cut_ops.add(i)

    # --- ops --------------------------------------------------------------------------------------------------------

    def _visit(self, i: int) -> None:
        op, states = self.graph.ops[i], self._operands(i)
        if op.kind == "lookup" and i not in self.structure.matrices:
            vocabulary = self.weights.lookup(i) == "vocabulary"
            self._put(i, Term(i, (op.module,)) if vocabulary else "whole")
        elif i in self.structure.matrices:
            self._multiply(i, states)
        elif op.gemms or self.graph.repeated[i]:
            self._settle(states)
            if (state := _joined(states.values())) == "cut":
                self._read_by_parts(i, states)
            self._put(i, state)
        else:
            self._combine(i, states)

    def _multiply(self, i: int, states: dict[int, State]) -> None:
        self._settle(states)
        state, module = _joined(states.values()), self.graph.ops[i].module
        how = self.weights.product(i, state)
        if how in ("column", "head"):
            self._read_by_parts(i, states)
        if how in ("dispatch", "combine"):
            self._exchange(i, how)
        if how == "head" and not self.training:
            self._send("all_gather", i, self._bytes(i))
        result: dict[Weighing, State] = {
            "column": "cut",
            "channels": "cut",
            "row": Term(i, (module,)),
            "head": "cut" if self.training else "whole",
            "dispatch": "routed",
            "experts": "routed",
        }
        self._put(i, result.get(how, "whole"))
        if how == "head":
            self.cut_ops.add(i)

    def _exchange(self, i: int, how: Weighing) -> None:
        """Tokens to their experts' ranks, or their results back to all ranks that share the batch. Each of these takes
        its slice of the tokens; of these and their routing weights the backward gathers the gradients."""
        payload, op = self.weights.exchange_bytes(i), self.graph.ops[i]
        self._send("all_to_all", i, payload, group="ep", ranks=self.ep)
        if how == "combine":
            self._send("all_gather", i, self._bytes_of_rows(i, op.gemms[0].n), tokens=True)
        if not self.training:
            return
        self._send("all_to_all", i, payload, group="ep", ranks=self.ep, direction="backward")
        if how == "dispatch":
            assert op.experts is not None
            for width in (op.experts.top_k, op.gemms[0].k):
                self._send("all_gather", i, self._bytes_of_rows(i, width), tokens=True, direction="backward")

    def _combine(self, i: int, states: dict[int, State]) -> None:
        """Any op without a product."""
        if any(isinstance(state, Term) for state in states.values()):
            if (term := self._kept_open(i, states)) is not None:
                self._put(i, term)
                return
            self._settle(states)
        state = _joined(states.values())
        if state == "cut":
            self._read_by_parts(i, states)
            for slot in range(len(self.graph.ops[i].inputs)):
                for path in self.graph.input_weights(i, slot):
                    self._combine_with(i, path)
            if self._spans(i):
                state = self._over_cut_axis(i)
        self._put(i, state)

    def _combine_with(self, i: int, path: str) -> None:
        """A parameter beside a cut value; of one that is whole each rank has a term of the gradient."""
        if self.weights.vector(i, path) or not self.training or path in self._summed:
            return
        self._summed.add(path)
        self._send("all_reduce", i, self._parameter_bytes[path], direction="backward")

    def _kept_open(self, i: int, states: dict[int, State]) -> Term | None:
        """The term that op i makes of a term without summing it first; None when it must be summed."""
        op, name = self.graph.ops[i], base_name(self.graph.ops[i])
        terms = [state for state in states.values() if isinstance(state, Term)]
        if any(state in ("cut", "routed") for state in states.values()):
            return None
        if op.kind in (*_COPIES, *_PICKS) and len(terms) == len(states) == 1:
            # a cast or copy is summed where it came from; rows picked or placed anew are another value
            return terms[0] if op.kind in _COPIES else Term(i, terms[0].modules)
        modules = tuple(dict.fromkeys(module for term in terms for module in term.modules))
        if name in _SUMS or (len(terms) == 1 and self._adds_rows(i)):
            return Term(i, modules)
        if name in _SCALINGS and len(terms) == 1:
            self._read_by_parts(i, {slot: state for slot, state in states.items() if state == "whole"})
            return Term(i, modules)
        return None

    def _adds_rows(self, i: int) -> bool:
        """Whether op i adds up rows (of a token's experts); one number a row is a norm's, which needs it whole."""
        op = self.graph.ops[i]
        width, kept = (self.graph.tensors[t].shape[-1:] for t in (op.inputs[0], op.outputs[0]))
        return base_name(op) in _TOTALS and width == kept

    def _spans(self, i: int) -> bool:
        """Whether op i puts numbers of different ranks together: it gives one number a token, or as many as the ranks
        cannot share (several ranks may hold one KV head)."""
        op = self.graph.ops[i]
        if op.kind in ("softmax", "loss"):
            return self.structure.layer_of(i) is None
        if op.kind != "norm" and base_name(op) not in _STATISTICS:
            return False
        counts = [divmod(self.graph.tensors[t].elements, self.tokens) for t in op.outputs]
        return any(
            left == 0 and (count == 1 or (count % self.tp and self.tp % count)) for count, left in counts if count
        )

    def _over_cut_axis(self, i: int) -> State:
        """A reduction over an axis that is cut."""
        op, name = self.graph.ops[i], base_name(self.graph.ops[i])
        if name in _TOTALS:
            return Term(i, (op.module,))
        if op.kind in ("softmax", "loss"):  # vocabulary-parallel cross-entropy: the largest, the sum, the target's own
            heads = [self.graph.ops[j].module for j in sorted(self.structure.heads) if j < i]
            for _ in range(3 if op.kind == "softmax" else 0):
                self._send("all_reduce", i, 4 * self.tokens, module=heads[-1:])
            return "whole"
        statistics = [
            t for t in op.outputs if self.graph.tensors[t].elements < self.graph.tensors[op.inputs[0]].elements
        ]
        self._send("all_reduce", i, sum(self.graph.tensors[t].bytes for t in statistics) or 4 * self.tokens)
        return "cut" if op.kind == "norm" else "whole"

    # --- transfers --------------------------------------------------------------------------------------------------

    def _settle(self, states: dict[int, State]) -> None:
        """Sum every open term among these operands."""
        for slot, state in states.items():
            if isinstance(state, Term):
                if not state.summed:
                    state.summed = True
                    origin = self.graph.ops[state.origin].outputs[0]
                    tokens = self.graph.tensors[origin].shape[-1:] == (self.stream_width,)
                    self._send(
                        "all_reduce", state.origin, self._bytes(state.origin), tokens=tokens, module=state.modules
                    )
                states[slot] = "whole"

    def _read_by_parts(self, i: int, states: dict[int, State]) -> None:
        """Training: the gradient of a whole value that each rank uses for its own part is a term; sum it once, where
        the value was made and not where it was copied or rows of it were picked."""
        if not self.training:
            return
        for slot, state in states.items():
            origin = self._made(self.graph.producers[i][slot])
            if state != "whole" or origin < 0 or origin in self._gradients:
                continue
            value = self.graph.tensors[self.graph.ops[origin].outputs[0]]
            self._gradients[origin] = Transfer(
                kind="all_reduce",
                module=self.graph.ops[i].module,
                payload_bytes=value.bytes,
                ranks=self.tp,
                times=self.graph.times[i],
                direction="backward",
                tokens=value.shape[-1:] == (self.stream_width,),
            )

    def _made(self, i: int) -> int:
        """The op that made what op i only copied, cast or picked rows of."""
        while i >= 0 and self.graph.ops[i].kind in (*_COPIES, "gather"):
            sources = [self.graph.producers[i][slot] for slot in self._operands(i)]
            if len(sources) != 1:
                break
            i = sources[0]
        return i

    def _send(
        self,
        kind: Literal["all_reduce", "all_gather", "all_to_all"],
        i: int,
        payload: int,
        *,
        group: str = "tp",
        ranks: int | None = None,
        tokens: bool = False,
        module: Iterable[str] = (),
        direction: Literal["forward", "backward"] = "forward",
    ) -> None:
        transfer = Transfer(
            kind=kind,
            module=" + ".join(module) or self.graph.ops[i].module,
            payload_bytes=payload,
            ranks=ranks or self.tp,
            group=group,
            times=self.graph.times[i],
            direction=direction,
            tokens=tokens,
        )
        if transfer.ranks > 1:
            self.transfers.append(transfer)

    def _bytes(self, i: int) -> int:
        return self.graph.tensors[self.graph.ops[i].outputs[0]].bytes

    def _bytes_of_rows(self, i: int, width: int) -> int:
        """Bytes of one row for each token, in the dtype of the result of product i."""
        return self.tokens * width * self.graph.tensors[self.graph.ops[i].outputs[0]].bits // 8


def stream_width(structure: Structure) -> int | None:
    """Width of the residual stream: that of most adds into it; None without any."""
    graph = structure.graph
    widths = [graph.tensors[graph.ops[i].outputs[0]].shape[-1] for i in structure.residual_adds]
    return max(set(widths), key=widths.count) if widths else None


def _joined(states: Iterable[State]) -> State:
    """State of what is made of these: a part wherever one of them is."""
    found = list(states)
    return "routed" if "routed" in found else "cut" if "cut" in found else "whole"
