"""Bound the speed-up of speculative decoding: expected tokens, draft and verify steps, break-even batch, best gamma.

Of gamma drafted tokens, each accepted with probability alpha until one is not, a step yields (1 - alpha^(gamma+1)) /
(1 - alpha) tokens (Leviathan et al. 2023). It costs gamma draft steps and one verify step, which is traced: gamma + 1
queries a sequence on top of the cached context, all logits. Times are roofline's sums of lower bounds, so the gain
fades as the verify step turns compute-bound. The draft is a model of its own (--draft, its decode traced), a share of
the target's decode step (--draft-cost), or, with neither, one layer and the head of the target (as EAGLE and MTP have).

Acceptance in `kinds` is cited, not measured here; it depends on the task. Sampling and launching cost nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from introspect.analyzers._cache import Part
from introspect.analyzers._roofline import machines, step_work
from introspect.analyzers._speculation import Draft, Speculation, decode_seconds, expected_tokens, part
from introspect.analyzers._step import Step
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
MOST_GAMMA = 16  # drafts beyond this are not looked at for best_gamma

BATCH_UNITS = {
    "gpu": "",
    "batch": "",
    "decode_seconds": "s",
    "draft_seconds": "s",
    "verify_seconds": "s",
    "speedup": "",
    "tokens_per_second": "tokens/s",
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
    dtype: str | None = option(None, "compute in this dtype instead of the config's", metavar="bf16|fp16|fp32")


def analyze(params: Params, traces: Traces) -> Result:
    """Totals on the first GPU, the gain by batch and by gamma on each, and kinds of draft."""
    run = RunShape(phase="decode", seq=1, context=params.context, dtype=params.dtype)
    decode, verify = Step(traces(run)), Step(traces(run.with_(seq=params.gamma + 1)))
    other = None if params.draft is None else Step(traces.other(params.draft)(run))
    found = machines(params)
    cases = [
        Speculation(decode=step_work(decode), verify=step_work(verify), queries=params.gamma + 1, machine=machine)
        for machine in found
    ]
    drafts = [_draft(params, case, decode, other) for case in cases]
    dtype = decode.trace.run.dtype or "bf16"
    return Result(
        command="speculate",
        model=describe_model(decode.trace),
        run=describe_run(decode.trace.run.with_(batch=params.batch)),
        totals=_totals(params, cases[0], drafts[0], decode),
        tables={
            "batches": _batch_table(params, cases, drafts),
            "gammas": _gamma_table(params, cases, drafts),
            "kinds": _kind_table(params, cases[0], decode, other),
        },
        assumptions=(
            *dict.fromkeys(line for machine in found for line in machine.assumptions(dtype)),
            f"alpha {params.alpha:g}: every drafted token is accepted with this probability, independently (--alpha)",
            f"draft: {drafts[0].name}",
            *decode.trace.assumptions,
        ),
        notes=tuple(_notes(decode, other)),
        unclassified=tuple(f"{op.op} in {op.module} ({op.count})" for op in decode.trace.unclassified),
    )


def _draft(params: Params, case: Speculation, decode: Step, other: Step | None) -> Draft:
    """The draft that was asked for; one layer and the head of the target when none was."""
    if params.draft_cost is not None:
        return _share_of(case, params.draft_cost)
    if other is not None:
        return Draft(
            name=f"{other.trace.model.id}, its own decode step",
            seconds=decode_seconds(step_work(other), case.machine),
            kv_bytes_per_token=_growth(other.parts, params.context),
            weight_bytes=other.weight_bytes,
        )
    return _part_of(params, case, decode, layer=True)


def _share_of(case: Speculation, cost: float) -> Draft:
    def seconds(batch: int) -> float | None:
        plain = case.decode_seconds(batch)
        return None if plain is None else cost * plain

    return Draft(name=f"{cost:g} of the target's decode step (--draft-cost)", seconds=seconds)


def _part_of(params: Params, case: Speculation, decode: Step, *, layer: bool) -> Draft:
    works = part(decode, layer=layer)
    sizes = {p.path: p.bytes for p in decode.trace.parameters}
    last = max((one.layer for one in decode.parts if one.layer), default=None)
    return Draft(
        name="one layer and the head of the target" if layer else "the target's head",
        seconds=decode_seconds(works, case.machine),
        kv_bytes_per_token=_growth((p for p in decode.parts if layer and p.layer == last), params.context),
        weight_bytes=sum(sizes.get(path, 0) for path in {path for work in works for path in work.weights}),
    )


def _growth(parts: Iterable[Part], context: int) -> int:
    """Cache bytes that one more token of one sequence takes."""
    return sum(one.bytes_at(context + 1) - one.bytes_at(context) for one in parts)


def _totals(params: Params, case: Speculation, draft: Draft, decode: Step) -> dict[str, Value]:
    gains = {gamma: case.speedup(params.batch, gamma, params.alpha, draft) or 0.0 for gamma in range(1, MOST_GAMMA + 1)}
    known = case.decode_seconds(params.batch) is not None
    return {
        "expected_tokens": expected_tokens(params.alpha, params.gamma),
        "speedup": case.speedup(params.batch, params.gamma, params.alpha, draft),
        "breakeven_batch": case.breakeven_batch(params.gamma, params.alpha, draft),
        "best_gamma": max(gains, key=lambda gamma: gains[gamma]) if known else None,
        "decode_seconds": case.decode_seconds(params.batch),
        "draft_seconds": draft.seconds(params.batch),
        "verify_seconds": case.verify_seconds(params.batch, params.gamma),
        "kv_bytes_per_token": _growth(decode.parts, params.context),
        "draft_kv_bytes_per_token": draft.kv_bytes_per_token,
        "draft_weight_bytes": draft.weight_bytes,
    }


def _batch_table(params: Params, cases: list[Speculation], drafts: list[Draft]) -> Table:
    rows: list[dict[str, Value]] = []
    for case, draft in zip(cases, drafts, strict=True):
        for batch in sorted({*BATCHES, params.batch}):
            speedup, plain = case.speedup(batch, params.gamma, params.alpha, draft), case.decode_seconds(batch)
            rows.append(
                {
                    "gpu": case.machine.gpu.name,
                    "batch": batch,
                    "decode_seconds": plain,
                    "draft_seconds": draft.seconds(batch),
                    "verify_seconds": case.verify_seconds(batch, params.gamma),
                    "speedup": speedup,
                    "tokens_per_second": None if speedup is None or plain is None else speedup * batch / plain,
                }
            )
    return Table(units=BATCH_UNITS, rows=tuple(rows))


def _gamma_table(params: Params, cases: list[Speculation], drafts: list[Draft]) -> Table:
    rows: tuple[dict[str, Value], ...] = tuple(
        {
            "gpu": case.machine.gpu.name,
            "gamma": gamma,
            "expected_tokens": expected_tokens(params.alpha, gamma),
            "speedup": case.speedup(params.batch, gamma, params.alpha, draft),
        }
        for case, draft in zip(cases, drafts, strict=True)
        for gamma in sorted({*range(1, MOST_GAMMA + 1), params.gamma})
    )
    return Table(units=GAMMA_UNITS, rows=rows)


def _kind_table(params: Params, case: Speculation, decode: Step, other: Step | None) -> Table:
    """Kinds of draft with a cost from the record where there is one, and their cited acceptance."""
    by_source = {
        "nothing": Draft(name="nothing", seconds=lambda batch: 0.0),
        "head": _part_of(params, case, decode, layer=False),
        "layer and head": _part_of(params, case, decode, layer=True),
    }
    if other is not None or params.draft_cost is not None:
        by_source["--draft"] = _draft(params, case, decode, other)
    kinds: list[dict[str, Any]] = parse_object(files("introspect").joinpath("data/drafts.json").read_bytes())["kinds"]
    return Table(units=KIND_UNITS, rows=tuple(_kind_row(params, case, by_source, kind) for kind in kinds))


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


def _notes(decode: Step, other: Step | None) -> Iterable[str]:
    yield f"best_gamma: of 1 to {MOST_GAMMA}, other lengths in proportion to the traced verify step"
    yield "breakeven_batch: the smallest batch beyond the last that gains; null: none gains, or all do"
    yield "kinds: acceptance as published for other models and tasks, an assumption here"
    if decode.states:
        yield "the model keeps recurrent states: after a rejected token an engine must have the earlier state at hand"
    if other is not None:
        own, drafts = (_vocabulary(step) for step in (decode, other))
        if own != drafts:
            yield f"the vocabularies differ ({own:,} and {drafts:,} rows): drafted tokens must mean the same in both"


def _vocabulary(step: Step) -> int:
    """Rows of the head: outputs of the products after which nothing but element-wise work comes."""
    graph = step.structure.graph
    return max((gemm.n for i in step.structure.heads for gemm in graph.ops[i].gemms), default=0)
