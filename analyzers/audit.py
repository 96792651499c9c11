"""Audit a model: is everything accounted for, and which usual hand formula would be wrong about it?

Every parameter must be in a product or counted outside; every op must have a cost rule; a decision that the model's
code took on a value is listed with the line that asked; other routes stand beside the record: torch's FLOP counter and
fvcore on the same run, and a small twin with random weights that really ran on the CPU. Whatever makes a number
doubtful is a finding and exits with 1: an unaccounted parameter, an op without a rule, a decision on an assumed value,
a route that disagrees. `hand_formulas` computes the model from its config as everyone does, one wrong rule at a time.
`precision` says in which dtype each kind of op computes; `nondeterministic` lists ops whose CUDA kernels may sum in any
order (https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from introspect.analyzers import kv, params, trace
from introspect.analyzers._audit_routes import route_rows
from introspect.analyzers._hand_formulas import Measured, hand_formulas
from introspect.analyzers._labels import Labels
from introspect.analyzers._op_table import op_table
from introspect.analyzers._positions import Positions
from introspect.analyzers._products import products
from introspect.analyzers._structure import Structure
from introspect.graph import Graph, base_name
from introspect.params import RunParams, Traces, option
from introspect.records import RunShape, Trace
from introspect.table import Result, Table, Value, describe_model, describe_run
from introspect.units import DTYPE_BITS

MODELS = "one"
EXAMPLES = (
    "introspect audit meta-llama/Meta-Llama-3-8B",
    "introspect audit ./config.json --strict --format json",
    "introspect audit my_model.py:build --no-routes",
)
Row = dict[str, Value]
ROUTE_TOKENS = 16  # tokens of the run that other counters see
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
    structure = Structure(Graph(record))
    runs = (record, *_decode(traces, run, record))
    doubts = [*_doubts(runs)]
    rows: tuple[Row, ...] = ()
    if not options.no_routes and _is_language_model(record):
        rows = tuple(route_rows(traces, run.with_(phase="prefill", batch=1, seq=ROUTE_TOKENS, context=0)))
        doubts += [
            f"{row['route']} disagrees on {row['kind']}: {row['ours']} here, {row['theirs']} there"
            for row in rows
            if row["agrees"] is False
        ]
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
            "hand_formulas": _hand_table(record, options, traces),
            "routes": Table(units=ROUTE_UNITS, rows=rows),
            "decisions": _decision_table(runs),
            "precision": _precision_table(structure),
            "position": _position_table(structure),
            "nondeterministic": _nondeterministic_table(record),
            "unused_parameters": _unused_table(record, structure),
        },
        assumptions=tuple(dict.fromkeys(text for one in runs for text in one.assumptions)),
        notes=tuple(f"finding: {doubt}" for doubt in dict.fromkeys(doubts)) or ("nothing makes a number doubtful",),
        unclassified=tuple(
            dict.fromkeys(f"{op.op} in {op.module} ({op.count})" for one in runs for op in one.unclassified)
        ),
        findings=bool(doubts),
    )


ROUTE_UNITS = {"route": "", "kind": "", "ours": "", "theirs": "", "agrees": "", "note": ""}


def _is_language_model(record: Trace) -> bool:
    """Whether token ids went in: a module with its user's own inputs has no other run to compare with."""
    return bool(record.cache) or any(op.kind == "lookup" for op, _ in record.walk())


def _decode(traces: Traces, run: RunShape, record: Trace) -> tuple[Trace, ...]:
    """The decode step of a model that keeps a cache."""
    if run.phase == "decode" or not record.cache:
        return ()
    return (traces(run.with_(phase="decode", seq=1, context=max(run.context, run.seq))),)


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


def _hand_table(record: Trace, options: Params, traces: Traces) -> Table:
    counted = params.analyze(params.Params(**_run_fields(options)), traces).totals
    flops = trace.analyze(trace.Params(**_run_fields(options)), traces).totals
    growth: dict[str, Value] = {}
    if record.cache:
        growth = kv.analyze(kv.Params(context=(options.seq,), dtype=options.dtype), traces).totals

    def number(totals: dict[str, Value], name: str) -> int:
        value = totals.get(name)
        return int(value) if isinstance(value, (int, float)) else 0

    routed = number(counted, "routed_experts")
    inactive = number(counted, "total") - number(counted, "unused") - number(counted, "active")
    return hand_formulas(
        record.model.config,
        Measured(
            total=number(counted, "total"),
            active=number(counted, "active"),
            attention=number(counted, "attention"),
            ffn=number(counted, "ffn"),
            embedding=number(counted, "embedding"),
            lm_head=number(counted, "lm_head"),
            routed=routed,
            routed_active=routed - inactive,
            flops_per_token=number(flops, "weight_flops") // max(1, record.run.tokens),
            kv_bytes_per_token=number(growth, "bytes_per_token"),
            kv_element_bytes=max((DTYPE_BITS[held.dtype] // 8 for held in record.cache), default=2),
        ),
    )


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
