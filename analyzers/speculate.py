"""Bound the speed-up of speculative decoding: expected tokens, draft and verify steps, break-even batch, best gamma.

Of gamma drafted tokens, each accepted with probability alpha until one is not, a step yields (1 - alpha^(gamma+1)) /
(1 - alpha) tokens (Leviathan et al. 2023). It costs gamma draft steps and one verify step, which is traced: gamma + 1
queries a sequence on top of the cached context, all logits; recurrent layers take a step for each of these tokens.
Times are roofline's sums of lower bounds, so the gain fades as the verify step turns compute-bound. The draft is a
model of its own (--draft, its decode traced), a share of the target's decode step (--draft-cost), or, with neither, one
layer (with attention, where one has it) and the head of the target, as EAGLE and MTP have.

Acceptance in `kinds` is cited, not measured here; it depends on the task. Sampling and launching cost nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from introspect.analyzers._cache import Part
from introspect.analyzers._roofline import Machine, machines, step_work
from introspect.analyzers._speculation import (
    Draft,
    Speculation,
    decode_seconds,
    expected_tokens,
    part,
    scan_flops,
    verify_work,
)
from introspect.analyzers._step import Step
from introspect.errors import OptionError
from introspect.params import GpuParams, Traces, option
from introspect.records import RunShape
from introspect.strict_json import parse_object
from introspect.table import Result, Table, Value, describe_model, describe_run

MODELS = "one"
EXAMPLES = (
    "introspect speculate meta-llama/Meta-Llama-3-8B --alpha 0.8 --gamma 4 --draft-cost 0.1",
    "introspect speculate meta-llama/Meta-Llama-3-70B --draft meta-llama/Meta-Llama-3-8B --context 8192",
    "introspect speculate deepseek-ai/DeepSeek-V3 --alpha 0.85 --gamma 1 --gpu h200",
)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
MOST_GAMMA = 16  # drafts beyond this are not looked at for best_gamma, whose verify step is of this length

BATCH_UNITS = {
    "gpu": "",
    "batch": "",
    "decode_seconds": "s",
    "draft_seconds": "s",
    "verify_seconds": "s",
    "speedup": "",
    "tokens_per_second": "tokens/s",
    "memory_bytes": "B",
    "fits": "",
}
GAMMA_UNITS = {"gpu": "", "gamma": "", "expected_tokens": "", "speedup": ""}
KIND_UNITS = {
    "kind": "",
    "cost_from": "",
    "draft_cost": "share",
    "alpha_low": "",
    "alpha_high": "",
    "speedup_low": "",
    "speedup_high": "",
    "about": "",
    "source": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(GpuParams):
    """What is drafted, how well, and at what load."""

    alpha: float = option(0.8, "probability that a drafted token is accepted", at_least=0, at_most=1)
    gamma: int = option(4, "tokens drafted a step")
    draft: str | None = option(None, "draft model, traced on its own", metavar="MODEL")
    draft_cost: float | None = option(None, "time of a draft step as a share of the target's decode step", metavar="C")
    batch: int = option(1, "sequences", short="b")
    context: int = option(2048, "cached tokens per sequence", short="c")
    dtype: str | None = option(None, "compute in this dtype instead of the config's", metavar="bf16|fp16|fp32|fp64")

    def __post_init__(self) -> None:
        """Refuse two costs of one draft."""
        if self.draft is not None and self.draft_cost is not None:
            raise OptionError("--draft-cost", self.draft_cost, "no --draft beside it, whose own step is its cost")


@dataclass(frozen=True, slots=True)
class _Traced:
    """The records: the target's decode step, a verify step of gamma + 1 tokens and one of MOST_GAMMA + 1, the draft's
    decode step."""

    decode: Step
    verify: Step
    longest: Step
    draft: Step | None

    @classmethod
    def of(cls, params: Params, traces: Traces) -> _Traced:
        run = RunShape(phase="decode", seq=1, context=params.context, dtype=params.dtype)
        decode, verify, longest = (Step(traces(run.with_(seq=1 + gamma))) for gamma in (0, params.gamma, MOST_GAMMA))
        return cls(decode, verify, longest, None if params.draft is None else Step(traces.other(params.draft)(run)))


@dataclass(frozen=True, slots=True)
class _Case:
    """One GPU. `longest` speculates from the longest verify step, whatever --gamma is."""

    asked: Speculation
    longest: Speculation
    draft: Draft

    @classmethod
    def of(cls, params: Params, traced: _Traced, machine: Machine) -> _Case:
        plain = step_work(traced.decode)
        asked, longest = (
            Speculation(plain, verify_work(traced.decode, step, gamma + 1), gamma + 1, machine)
            for step, gamma in ((traced.verify, params.gamma), (traced.longest, MOST_GAMMA))
        )
        return cls(asked, longest, _draft(params, asked, traced))

    def speedup(self, params: Params, gamma: int) -> float | None:
        """The gain of another number of drafted tokens; that of --gamma from its own record."""
        case = self.asked if gamma == params.gamma or gamma > MOST_GAMMA else self.longest
        return case.speedup(params.batch, gamma, params.alpha, self.draft)

    def best_gamma(self, params: Params) -> int | None:
        """Of 0, which is no speculation, to MOST_GAMMA; None when the GPU's rate is unknown."""
        gains = {0: 1.0}
        for gamma in range(1, MOST_GAMMA + 1):
            gain = self.longest.speedup(params.batch, gamma, params.alpha, self.draft)
            if gain is None:
                return None
            gains[gamma] = gain
        return max(gains, key=lambda gamma: gains[gamma])


def analyze(params: Params, traces: Traces) -> Result:
    """Totals on the first GPU, the gain by batch and by gamma on each, and kinds of draft."""
    traced = _Traced.of(params, traces)
    decode = traced.decode
    found = machines(params)
    cases = [_Case.of(params, traced, machine) for machine in found]
    dtype = decode.trace.run.dtype or "bf16"
    return Result(
        command="speculate",
        model=describe_model(decode.trace),
        run=describe_run(decode.trace.run.with_(batch=params.batch)),
        totals=_totals(params, cases[0], traced),
        tables={
            "batches": _batch_table(params, cases, traced),
            "gammas": _gamma_table(params, cases),
            "kinds": _kind_table(params, cases[0], traced),
        },
        assumptions=(
            *dict.fromkeys(line for machine in found for line in machine.assumptions(dtype)),
            f"alpha {params.alpha:g}: every drafted token is accepted with this probability, independently (--alpha)",
            f"draft: {cases[0].draft.name}",
            *decode.trace.assumptions,
        ),
        notes=tuple(_notes(params, cases[0], traced)),
        unclassified=tuple(f"{op.op} in {op.module} ({op.count})" for op in decode.trace.unclassified),
    )


def _draft(params: Params, case: Speculation, traced: _Traced) -> Draft:
    """The draft that was asked for; one layer and the head of the target when none was."""
    if params.draft_cost is not None:
        return _share_of(case, params.draft_cost)
    if (other := traced.draft) is not None:
        return Draft(
            name=f"{other.trace.model.id}, its own decode step",
            seconds=decode_seconds(step_work(other), case.machine),
            kv_bytes_per_token=_growth(other.parts, params.context),
            kv_bytes=sum(one.bytes_at(params.context) for one in other.parts),
            weight_bytes=other.weight_bytes,
        )
    return _part_of(params, case, traced.decode, layer=True)


def _share_of(case: Speculation, cost: float) -> Draft:
    def seconds(batch: int) -> float | None:
        plain = case.decode_seconds(batch)
        return None if plain is None else cost * plain

    return Draft(name=f"{cost:g} of the target's decode step (--draft-cost)", seconds=seconds)


def _part_of(params: Params, case: Speculation, decode: Step, *, layer: bool) -> Draft:
    works = part(decode, layer=layer)
    sizes = {p.path: p.bytes for p in decode.trace.parameters}
    growing = [one.layer for one in decode.parts if one.row_bits]
    last = max(growing or [one.layer for one in decode.parts], default=None)
    own = [one for one in decode.parts if layer and one.layer == last]
    attention = " with attention" if growing and decode.states else ""
    return Draft(
        name=f"one layer{attention} and the head of the target" if layer else "the target's head",
        seconds=decode_seconds(works, case.machine),
        kv_bytes_per_token=_growth(own, params.context),
        kv_bytes=sum(one.bytes_at(params.context) for one in own),
        weight_bytes=sum(sizes.get(path, 0) for path in {path for work in works for path in work.weights}),
    )


def _growth(parts: Iterable[Part], context: int) -> int:
    """Cache bytes that one more token of one sequence takes."""
    return sum(one.growth_at(context) for one in parts)


def _memory_bytes(params: Params, draft: Draft, decode: Step, batch: int) -> int:
    """Weights and cache of the target and of the draft; nothing of a draft of which only the cost is given."""
    sequence = sum(one.bytes_at(params.context) for one in decode.parts) + (draft.kv_bytes or 0)
    return decode.weight_bytes + (draft.weight_bytes or 0) + batch * sequence


def _totals(params: Params, case: _Case, traced: _Traced) -> dict[str, Value]:
    asked, draft, decode = case.asked, case.draft, traced.decode
    return {
        "expected_tokens": expected_tokens(params.alpha, params.gamma),
        "speedup": asked.speedup(params.batch, params.gamma, params.alpha, draft),
        "breakeven_batch": asked.breakeven_batch(params.gamma, params.alpha, draft),
        "gains": asked.gains(params.gamma, params.alpha, draft),
        "best_gamma": case.best_gamma(params),
        "decode_seconds": asked.decode_seconds(params.batch),
        "draft_seconds": draft.seconds(params.batch),
        "verify_seconds": asked.verify_seconds(params.batch, params.gamma),
        "kv_bytes_per_token": _growth(decode.parts, params.context),
        "draft_kv_bytes_per_token": draft.kv_bytes_per_token,
        "draft_weight_bytes": draft.weight_bytes,
        "memory_bytes": _memory_bytes(params, draft, decode, params.batch),
        "fits": _memory_bytes(params, draft, decode, params.batch) <= asked.machine.memory_bytes,
    }


def _batch_table(params: Params, cases: list[_Case], traced: _Traced) -> Table:
    rows: list[dict[str, Value]] = []
    for case in cases:
        asked, draft = case.asked, case.draft
        for batch in sorted({*BATCHES, params.batch}):
            speedup, plain = asked.speedup(batch, params.gamma, params.alpha, draft), asked.decode_seconds(batch)
            held = _memory_bytes(params, draft, traced.decode, batch)
            rows.append(
                {
                    "gpu": asked.machine.gpu.name,
                    "batch": batch,
                    "decode_seconds": plain,
                    "draft_seconds": draft.seconds(batch),
                    "verify_seconds": asked.verify_seconds(batch, params.gamma),
                    "speedup": speedup,
                    "tokens_per_second": None if speedup is None or plain is None else speedup * batch / plain,
                    "memory_bytes": held,
                    "fits": held <= asked.machine.memory_bytes,
                }
            )
    return Table(units=BATCH_UNITS, rows=tuple(rows))


def _gamma_table(params: Params, cases: list[_Case]) -> Table:
    rows: tuple[dict[str, Value], ...] = tuple(
        {
            "gpu": case.asked.machine.gpu.name,
            "gamma": gamma,
            "expected_tokens": expected_tokens(params.alpha, gamma),
            "speedup": case.speedup(params, gamma),
        }
        for case in cases
        for gamma in sorted({*range(1, MOST_GAMMA + 1), params.gamma})
    )
    return Table(units=GAMMA_UNITS, rows=rows)


def _kind_table(params: Params, case: _Case, traced: _Traced) -> Table:
    """Kinds of draft with a cost from the record where there is one, and their cited acceptance."""
    asked = case.asked
    by_source = {
        "nothing": Draft(name="nothing", seconds=lambda batch: 0.0),
        "head": _part_of(params, asked, traced.decode, layer=False),
        "layer and head": _part_of(params, asked, traced.decode, layer=True),
    }
    if traced.draft is not None or params.draft_cost is not None:
        by_source["--draft"] = case.draft
    kinds: list[dict[str, Any]] = parse_object(files("introspect").joinpath("data/drafts.json").read_bytes())["kinds"]
    return Table(units=KIND_UNITS, rows=tuple(_kind_row(params, asked, by_source, kind) for kind in kinds))


def _kind_row(params: Params, case: Speculation, by_source: dict[str, Draft], kind: dict[str, Any]) -> dict[str, Value]:
    draft = by_source.get(kind["cost_from"])
    plain = case.decode_seconds(params.batch)
    seconds = None if draft is None else draft.seconds(params.batch)
    low, high = kind["alpha"] or (None, None)

    def gain(alpha: float | None) -> float | None:
        return None if draft is None or alpha is None else case.speedup(params.batch, params.gamma, alpha, draft)

    return {
        "kind": kind["kind"],
        "cost_from": kind["cost_from"],
        "draft_cost": None if seconds is None or not plain else seconds / plain,
        "alpha_low": low,
        "alpha_high": high,
        "speedup_low": gain(low),
        "speedup_high": gain(high),
        "about": kind["about"],
        "source": kind["source"],
    }


def _notes(params: Params, case: _Case, traced: _Traced) -> Iterable[str]:
    yield f"best_gamma: of 0 (no speculation) to {MOST_GAMMA}, from a traced verify step of {MOST_GAMMA + 1}"
    yield "breakeven_batch: the smallest batch beyond the last that gains; null: see gains"
    yield "fits: weights and cache of target and draft on one GPU at --context; times are as if they did"
    yield "kinds: acceptance as published for other models and tasks, an assumption here"
    if traced.decode.states:
        yield "the model keeps recurrent states: after a rejected token an engine must have the earlier state at hand"
    recorded, counted = scan_flops(step_work(traced.verify)), scan_flops(case.asked.verify)
    if counted < recorded:
        work = f"{counted:,} FLOP" if counted else "element-wise and no FLOP"
        yield (
            f"scans of the verify step: {params.gamma + 1} decode steps, {work}; this code pads them to whole chunks, "
            f"{recorded:,} FLOP"
        )
    if traced.draft is not None:
        own, drafts = (_vocabulary(step) for step in (traced.decode, traced.draft))
        if own != drafts:
            yield f"the vocabularies differ ({own:,} and {drafts:,} rows): drafted tokens must mean the same in both"


def _vocabulary(step: Step) -> int:
    """Rows of the head: outputs of the products after which nothing but element-wise work comes."""
    graph = step.structure.graph
    return max((gemm.n for i in step.structure.heads for gemm in graph.ops[i].gemms), default=0)
