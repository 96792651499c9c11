"""One recorded training step, with and without checkpointing: its FLOPs by part and the parameters it trains.

Parts: products with weights, attention, other products of two activations (scans), each forward, dx and dw. A fused
attention's backward computes the scores again; a checkpointed step repeats its layers. MFU counts neither repetition.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property

from introspect.analyzers._components import Components, Placed
from introspect.analyzers._labels import Labels
from introspect.analyzers._optimizers import Trained
from introspect.analyzers._structure import Structure
from introspect.errors import TraceShapeError
from introspect.graph import Graph
from introspect.params import Traces
from introspect.records import Gemm, Op, RunShape, Trace

SCORES_AGAIN = "attention scores again"
_WEIGHTED = ("linear", "grouped", "conv")


class TrainingStep:
    """The step of a run and what follows from it. `checkpointed` is None where no such step is known."""

    def __init__(self, run: RunShape, traces: Traces) -> None:
        self.plain = traces(run)
        self.checkpointed = _checkpointed(run, traces)
        self.structure = Structure(Graph(self.plain))

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return self.plain.run.tokens

    @property
    def dtype(self) -> str:
        """The compute dtype."""
        return self.plain.run.dtype or "bf16"

    @cached_property
    def flops(self) -> dict[str, int]:
        """FLOPs of the step by part."""
        return flops_by_part(self.plain)

    @property
    def flops_per_token(self) -> float:
        """FLOPs of everything that ran, for each token."""
        return per_token(sum(self.flops.values()), self.tokens)

    @property
    def model_flops_per_token(self) -> float:
        """The same without what the fused attention backward computes a second time."""
        return per_token(sum(count for part, count in self.flops.items() if part != SCORES_AGAIN), self.tokens)

    @property
    def recompute_flops_per_token(self) -> float | None:
        """FLOPs of everything that ran with checkpointing, for each token."""
        if self.checkpointed is None:
            return None
        return per_token(sum(flops_by_part(self.checkpointed).values()), self.tokens)

    @property
    def checkpointed_bytes(self) -> int | None:
        """Boundary tensors and the largest recomputed layer."""
        if self.checkpointed is None or self.checkpointed.saved_bytes is None:
            return None
        return self.checkpointed.saved_bytes + (self.checkpointed.recomputed_bytes or 0)

    @cached_property
    def placed(self) -> tuple[Placed, ...]:
        """Every parameter once, with its component."""
        return tuple(Components(Labels(self.structure)).placed())

    @cached_property
    def trained(self) -> tuple[Trained, ...]:
        """Every parameter once, as an optimiser sees it."""
        matrices = {
            path
            for i, paths in self.structure.matrices.items()
            if any(gemm.kind != "conv" for gemm in self.structure.graph.ops[i].gemms)
            for path in paths
        }
        return tuple(
            Trained(
                one.parameter,
                hidden_matrix=one.parameter.path in matrices
                and len(one.parameter.shape) > 1
                and one.component not in ("embedding", "lm_head"),
            )
            for one in self.placed
        )

    def rules(self) -> list[tuple[str, int]]:
        """What N of 6N may mean: all parameters, those in products, and of routed experts the ones a token uses."""
        multiplied = frozenset().union(*self.structure.matrices.values())
        inside = [one for one in self.placed if one.parameter.path in multiplied]
        active = sum(one.parameter.count * one.active_share[0] // one.active_share[1] for one in inside)
        return [
            ("all parameters", sum(one.parameter.count for one in self.placed)),
            ("parameters in products", sum(one.parameter.count for one in inside)),
            ("parameters in products that a token uses", active),
        ]


def _checkpointed(run: RunShape, traces: Traces) -> Trace | None:
    try:
        trace = traces(run.with_(checkpointing=True))
    except TraceShapeError:  # a stored record is of one step
        return None
    return None if trace.recomputed_bytes is None else trace


def per_token(total: int, tokens: int) -> float:
    """The quotient, an integer where it is one."""
    return total // tokens if total % tokens == 0 else total / tokens


def flops_by_part(trace: Trace) -> dict[str, int]:
    """FLOPs of a step by part, in the order in which parts first ran."""
    found: defaultdict[str, int] = defaultdict(int)
    for op, times in trace.walk():
        for gemm in op.gemms:
            found[_part(op, gemm)] += gemm.flops * times
    return dict(found)


def _part(op: Op, gemm: Gemm) -> str:
    if op.backward and gemm.kind == "attention_qk" and gemm.direction == "dx" and gemm.out is None:
        return SCORES_AGAIN
    attention = gemm.kind in ("attention_qk", "attention_pv")
    operands = "weights" if gemm.kind in _WEIGHTED else "attention" if attention else "two activations"
    again = op.backward and gemm.direction == "forward"
    return f"{operands} {'recomputed' if again else gemm.direction}"
