"""One recorded training step, with and without checkpointing: its FLOPs by part and the parameters it trains.

Parts: products with weights, attention, other products of two activations (scans), each forward, dx and dw. A fused
attention's backward computes the scores again; a checkpointed step repeats its layers. MFU counts neither repetition,
nor the rows of experts that a token did not choose, where an implementation (Llama 4's) multiplies them all.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property

from introspect.analyzers._components import Components, Placed
from introspect.analyzers._labels import Labels
from introspect.analyzers._optimizers import Trained
from introspect.analyzers._structure import Structure
from introspect.errors import ModelRunError, TraceShapeError
from introspect.graph import Graph
from introspect.params import Traces
from introspect.records import Gemm, Op, RunShape, Trace

SCORES_AGAIN = "attention scores again"
_WEIGHTED = ("linear", "grouped", "conv")


class TrainingStep:
    """The step of a run and what follows from it. `checkpointed` is None where no such step is known; `problem` says
    why."""

    def __init__(self, run: RunShape, traces: Traces) -> None:
        self.plain = traces(run)
        self.checkpointed, self.problem = _checkpointed(run, traces)
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

    @cached_property
    def unchosen_flops(self) -> int:
        """FLOPs of experts on tokens that did not choose them; 0 where rows are sent to the chosen experts alone."""
        return _unchosen_flops(self.plain)

    @property
    def model_flops_per_token(self) -> float:
        """The same without what the fused attention backward computes a second time, and without unchosen experts."""
        once = sum(count for part, count in self.flops.items() if part != SCORES_AGAIN)
        return per_token(once - self.unchosen_flops, self.tokens)

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


def second_step(run: RunShape, traces: Traces) -> tuple[Trace | None, str]:
    """The record of another step of the same model; None, and why, where there is none."""
    try:
        return traces(run), ""
    except TraceShapeError:
        return None, "a stored record is of one step"
    except ModelRunError as error:
        return None, f"the run failed at {error.where}: {error.problem}"


def _checkpointed(run: RunShape, traces: Traces) -> tuple[Trace | None, str]:
    trace, problem = second_step(run.with_(checkpointing=True), traces)
    if trace is not None and trace.recomputed_bytes is None:
        return None, "the model offers none"
    return trace, problem


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


def _unchosen_flops(trace: Trace) -> int:
    """Products of a module's experts in proportion to the rows beyond tokens x top-k; a backward op names no routing
    of its own, but belongs to the module that routed."""
    executed: dict[str, tuple[int, int]] = {}
    for op, _ in trace.walk():
        if op.experts is not None and op.experts.top_k:
            rows, chosen = sum(op.experts.rows), op.experts.tokens * op.experts.top_k
            executed[op.module] = rows, max(0, rows - chosen)
    found = 0
    for op, times in trace.walk():
        rows, unchosen = executed.get(op.module, (0, 0))
        if unchosen:
            found += sum(gemm.flops * unchosen // rows for gemm in op.gemms if gemm.kind == "grouped") * times
    return found


def _part(op: Op, gemm: Gemm) -> str:
    if op.backward and gemm.kind == "attention_qk" and gemm.direction == "dx" and gemm.out is None:
        return SCORES_AGAIN
    attention = gemm.kind in ("attention_qk", "attention_pv")
    operands = "weights" if gemm.kind in _WEIGHTED else "attention" if attention else "two activations"
    again = op.backward and gemm.direction == "forward"
    return f"{operands} {'recomputed' if again else gemm.direction}"
