"""Audit a model: is everything accounted for, and which usual hand formula would be wrong about it?

Every parameter must be in a product or counted outside; every op must have a cost rule; a decision that the model's
code took on a value is listed with the line that asked; other routes stand beside the record: torch's FLOP counter and
fvcore on the same run, and a small twin with random weights that really ran on the CPU. Whatever makes a number
doubtful is a finding and exits with 1: an unaccounted parameter, an op without a rule, a decision on an assumed value,
a route that disagrees. `hand_formulas` computes the model from its config as everyone does, one wrong rule at a time,
all else as recorded: FLOPs against an engine's for one token, the cache by what a token adds at `--context` (without
it where every layer grows, all_layers_full where every window is full; `context` says how many tokens are cached).
`precision` says in which dtype each kind of op computes; `nondeterministic` lists ops whose CUDA kernels may sum in any
order (https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from introspect.analyzers import params
from introspect.analyzers._audit_routes import SecondRoutes, second_routes
from introspect.analyzers._hand_facts import ffn_chains, head_matrices, head_params, layers_beside, token_flops
from introspect.analyzers._hand_formulas import CacheFacts, Measured, hand_formulas
from introspect.analyzers._labels import Labels
from introspect.analyzers._op_table import op_table
from introspect.analyzers._positions import Positions
from introspect.analyzers._products import products
from introspect.analyzers._step import Step
from introspect.analyzers._structure import Structure
from introspect.errors import TraceShapeError
from introspect.graph import base_name
from introspect.params import RunParams, Traces, option
from introspect.records import RunShape, Trace
from introspect.table import Result, Table, Value, describe_model, describe_run
from introspect.units import number_text

MODELS = "one"
EXAMPLES = (
    "introspect audit meta-llama/Meta-Llama-3-8B",
    "introspect audit ./config.json --strict --format json",
    "introspect audit my_model.py:build --no-routes",
)
Row = dict[str, Value]
# Base names of ops that torch documents as nondeterministic on CUDA.
NONDETERMINISTIC = (
    *("index_add", "scatter_add", "scatter_reduce", "index_put", "put", "cumsum", "bincount", "histc", "kthvalue"),
    *("median", "embedding_dense_backward", "_embedding_bag", "upsample_bilinear2d", "upsample_bicubic2d"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(RunParams):
    """Which run is audited; a decode step is looked at beside it."""

    no_routes: bool = option(False, "leave out the second routes (other counters and the twin), which take most time")


def analyze(options: Params, traces: Traces) -> Result:
    """The findings, and the tables they rest on."""
    run = options.run_shape()
    record = traces(run)
    steps = (Step(record), *map(Step, _decode(traces, run, record)))
    structure, runs = steps[0].structure, tuple(step.trace for step in steps)
    doubts = [*_doubts(runs)]
    routes = SecondRoutes() if options.no_routes else second_routes(traces, run)
    doubts += routes.disagreements
    unaccounted = _unaccounted(record, structure)
    if unaccounted:
        doubts.append(f"{unaccounted:,} parameters are neither in a product nor read by any other op's rule")
    return Result(
        command="audit",
        model=describe_model(record),
        run=describe_run(record.run),
        totals={
            "unaccounted_params": unaccounted,
            "unclassified": sum(op.count for one in runs for op in one.unclassified),
            "decisions": sum(len(one.decisions) for one in runs),
            "unused": sum(p.count for p in record.parameters if not (p.touched or p.buffer or p.tied_to)),
        },
        tables={
            "hand_formulas": _hand_table(steps, options, traces),
            "routes": Table(units=ROUTE_UNITS, rows=routes.rows),
            "decisions": _decision_table(runs),
            "precision": _precision_table(structure),
            "position": _position_table(structure),
            "nondeterministic": _nondeterministic_table(record),
            "unused_parameters": _unused_table(record, structure),
        },
        assumptions=tuple(dict.fromkeys(text for one in runs for text in one.assumptions)),
        notes=(
            *_said(doubts),
            *routes.notes,
            *_one_step_note(runs),
            *_engine_note(steps[-1]),
        ),
        unclassified=tuple(
            dict.fromkeys(f"{op.op} in {op.module} ({op.count})" for one in runs for op in one.unclassified)
        ),
        findings=bool(doubts),
    )


ROUTE_UNITS = {"route": "", "kind": "", "ours": "", "theirs": "", "agrees": "", "note": ""}


def _decode(traces: Traces, run: RunShape, record: Trace) -> tuple[Trace, ...]:
    """The decode step of a model that keeps a cache, where any other step than the record's can be had."""
    if run.phase == "decode" or not record.cache:
        return ()
    try:
        return (traces(run.with_(phase="decode", seq=1, context=max(run.context, run.seq))),)
    except TraceShapeError:  # a stored record, or inputs that came with the model, are one step
        return ()


def _one_step_note(runs: tuple[Trace, ...]) -> Iterator[str]:
    """Said where a model keeps a cache and no decode step could be looked at."""
    if len(runs) == 1 and runs[0].cache and runs[0].run.phase != "decode":
        yield f"no decode step was looked at: this {runs[0].run.phase} step is all there is"


def _doubts(runs: Iterable[Trace]) -> Iterator[str]:
    for one in runs:
        for op in one.unclassified:
            yield f"{op.op} in {op.module or 'the root module'} has no cost rule ({op.count} times, {one.run.phase})"
        for decision in one.decisions:
            if decision.answered == "assumed":
                yield (
                    f"{decision.where} asked {decision.question} of a value that depends on weights; "
                    f"{decision.answer} was assumed"
                )
        for text in one.assumptions:
            if "visible" in text:
                yield text


def _unaccounted(record: Trace, structure: Structure) -> int:
    """Parameters that were read, by no product and by no op with a rule."""
    multiplied = {path for product in products(structure) for path, _ in product.weights}
    known = {
        record.tensors[i].parameter
        for op, _ in record.walk()
        if op.kind not in ("unclassified", "layout", "factory")
        for i in op.inputs
    }
    return sum(
        p.count
        for p in record.parameters
        if p.touched and not p.buffer and p.tied_to is None and p.path not in multiplied and p.path not in known
    )


def _hand_table(steps: tuple[Step, ...], options: Params, traces: Traces) -> Table:
    """Parameters from the run asked for; FLOPs and the cache from the decode step, where the model has one."""
    counted = params.analyze(params.Params(**_run_fields(options)), traces).totals
    structure, last = steps[0].structure, steps[-1]
    parts = last.parts if last.trace.run.phase == "decode" else ()
    head, head_in_table = head_params(structure)
    flops = token_flops(last)
    total, active = counted["total"], counted["active"]
    assert isinstance(total, int)
    return hand_formulas(
        steps[0].trace.model.config,
        Measured(
            total=total,
            active=active if isinstance(active, int) else None,
            head=head,
            head_in_table=head_in_table,
            heads=head_matrices(structure),
            ffn=ffn_chains(structure),
            flops_per_token=flops.engine,
            flops_all_experts=flops.all_experts,
            cache=CacheFacts(parts=parts, layers=layers_beside(last.structure), context=options.context),
        ),
    )


def _said(doubts: list[str]) -> tuple[str, ...]:
    return tuple(f"finding: {doubt}" for doubt in dict.fromkeys(doubts)) or ("nothing makes a number doubtful",)


def _engine_note(step: Step) -> Iterator[str]:
    """Said where the code as written multiplies more weights for a token than an engine would."""
    flops = token_flops(step)
    if flops.executed > flops.engine:
        executed, engine = (number_text(figure, "FLOP") for figure in (flops.executed, flops.engine))
        yield f"hand_formulas: an engine multiplies weights for {engine} a token, this code for {executed}"


def _run_fields(options: Params) -> dict[str, Any]:
    return {name: getattr(options, name) for name in RunParams.__dataclass_fields__}


def _decision_table(runs: Iterable[Trace]) -> Table:
    counts = Counter(
        (one.run.phase, d.question, d.answer, d.answered, d.where, d.module) for one in runs for d in one.decisions
    )
    names = ("phase", "question", "answer", "answered", "where", "module")
    rows: tuple[Row, ...] = tuple(
        {**dict(zip(names, key, strict=True)), "count": count} for key, count in counts.items()
    )
    return Table(units=dict.fromkeys((*names, "count"), ""), rows=rows)


def _precision_table(structure: Structure) -> Table:
    counts: Counter[tuple[str, str]] = Counter()
    for product in products(structure):
        counts[product.kind, product.dtype] += product.times
    for row in op_table(Labels(structure)).rows:
        if isinstance(row["count"], int):
            counts[str(row["kind"]), str(row["compute_dtype"])] += row["count"]
    rows: tuple[Row, ...] = tuple(
        {"op": op, "compute_dtype": dtype, "count": count} for (op, dtype), count in sorted(counts.items())
    )
    return Table(units={"op": "", "compute_dtype": "", "count": ""}, rows=rows)


def _position_table(structure: Structure) -> Table:
    rows: tuple[Row, ...] = tuple({"encoding": kind, "layers": layers} for kind, layers in Positions(structure).rows())
    return Table(units={"encoding": "", "layers": ""}, rows=rows)


def _nondeterministic_table(record: Trace) -> Table:
    counts: Counter[str] = Counter()
    for op, times in record.walk():
        if base_name(op) in NONDETERMINISTIC:
            counts[op.name] += times
    rows: tuple[Row, ...] = tuple({"op": name, "count": count} for name, count in counts.most_common())
    return Table(units={"op": "", "count": ""}, rows=rows)


def _unused_table(record: Trace, structure: Structure) -> Table:
    unused: Counter[str] = Counter()
    for p in record.parameters:
        if not (p.touched or p.buffer or p.tied_to):
            unused[structure.layers.split(p.path)[0]] += p.count
    rows: tuple[Row, ...] = tuple({"parameter": name, "params": count} for name, count in unused.items())
    return Table(units={"parameter": "", "params": ""}, rows=rows)
