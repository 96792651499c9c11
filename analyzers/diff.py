"""Set two models side by side: config, parameters by part, products, cache, FLOPs, and which field made the difference.

`delta` is b - a. `fields` takes each differing field of B over into A alone, builds A again and decodes one token: what
that one field adds in parameters and their bytes, in cache bytes a token, in FLOPs a token as an engine runs it (null
where A's class cannot be built or run with it); fields interact, so they need not add up. Between two classes there is
no such table: their fields mean other things.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from introspect.analyzers import kv, params, trace
from introspect.analyzers._kv_memory import KvMemory
from introspect.analyzers._step import Step
from introspect.params import RunParams, Traces
from introspect.records import RunShape, Trace
from introspect.substitution_record import Substituted
from introspect.table import Result, Table, Value, describe_model, describe_run

MODELS = "two"
EXAMPLES = (
    "introspect diff meta-llama/Llama-2-7b-hf meta-llama/Meta-Llama-3-8B",
    "introspect diff ./old/config.json ./new/config.json --format json",
)
COMPONENTS = (
    *("total", "active", "embedding", "lm_head", "attention", "ffn", "norm", "router", "other", "bias", "layers"),
    *("routed_experts", "shared_experts", "unused", "weight_bytes"),
)
FIELD_UNITS = {
    **dict.fromkeys(("field", "a", "b", "params_delta"), ""),
    "weight_bytes_delta": "B",
    "kv_bytes_per_token_delta": "B",
    "flops_per_token_delta": "FLOP",
}
_NOT_SIZES = ("architectures", "transformers_version", "_name_or_path", "model_type")
_DTYPE_NAMES = ("torch_dtype", "dtype")  # one field: the library's older and newer name of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(RunParams):
    """The run in which both are compared."""


def analyze(options: Params, both: tuple[Traces, Traces]) -> Result:
    """Differences by component, field and product."""
    run = options.run_shape()
    first, second = both[0](run), both[1](run)
    return Result(
        command="diff",
        model={**describe_model(first), "other": second.model.id, "other_class": second.model.class_name},
        run=describe_run(first.run),
        totals={
            "fields_differing": len(_differing(first, second)),
            **{f"{name}_delta": _delta(a, b) for name, (a, b) in _step_figures(options, both, (first, second)).items()},
        },
        tables={
            "components": _components(options, both),
            "step": _side_by_side("quantity", _step_figures(options, both, (first, second))),
            "config": _config(first, second),
            "fields": _fields(options, first, second, both[0]),
            "gemms": _gemms(options, both),
        },
        assumptions=tuple(dict.fromkeys((*first.assumptions, *second.assumptions))),
        notes=_notes(options, first, second),
        unclassified=tuple(f"{op.op} in {op.module}" for one in (first, second) for op in one.unclassified),
    )


def _components(options: Params, both: tuple[Traces, Traces]) -> Table:
    chosen = params.Params(**_run_fields(options))
    a, b = (params.analyze(chosen, traces).totals for traces in both)
    return _side_by_side("component", {name: (a.get(name), b.get(name)) for name in COMPONENTS})


def _step_figures(
    options: Params, both: tuple[Traces, Traces], records: tuple[Trace, Trace]
) -> dict[str, tuple[Value, Value]]:
    """FLOPs and bytes of the run, and what a cached token takes."""
    chosen = trace.Params(**_run_fields(options))
    a, b = (trace.analyze(chosen, traces).totals for traces in both)
    names = ("weight_flops", "attention_flops", "engine_flops", "weight_bytes_read", "kv_bytes_written")
    found: dict[str, tuple[Value, Value]] = {name: (a.get(name), b.get(name)) for name in names}
    caches = [_growth(options, traces, record) for traces, record in zip(both, records, strict=True)]
    found["kv_bytes_per_token"] = (caches[0], caches[1])
    return found


def _growth(options: Params, traces: Traces, record: Trace) -> Value:
    if not record.cache:
        return None
    return kv.analyze(kv.Params(context=(_cached(options),), dtype=options.dtype), traces).totals["bytes_per_token"]


def _cached(options: Params) -> int:
    """Tokens in the cache when one more is decoded."""
    return max(options.seq, 1)


def _run_fields(options: Params) -> dict[str, Any]:
    return {name: getattr(options, name) for name in RunParams.__dataclass_fields__}


def _side_by_side(name: str, pairs: dict[str, tuple[Value, Value]]) -> Table:
    rows = tuple({name: key, "a": a, "b": b, "delta": _delta(a, b)} for key, (a, b) in pairs.items())
    return Table(units=dict.fromkeys((name, "a", "b", "delta"), ""), rows=rows)


def _delta(a: Value, b: Value) -> Value:
    numbers = isinstance(a, (int, float)) and isinstance(b, (int, float))
    return b - a if numbers else None  # type: ignore[operator]  # both are numbers here


def _differing(first: Trace, second: Trace) -> dict[str, tuple[Any, Any]]:
    a, b = first.model.config, _spelt_as(first.model.config, second.model.config)
    return {name: (a.get(name), b.get(name)) for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name)}


def _spelt_as(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """The fields of b, its dtype under the name that a has for it."""
    own = next((name for name in _DTYPE_NAMES if name in a), None)
    return b if own is None else {own if name in _DTYPE_NAMES else name: value for name, value in b.items()}


def _config(first: Trace, second: Trace) -> Table:
    rows = tuple(
        {"field": name, "a": _text(a), "b": _text(b)} for name, (a, b) in sorted(_differing(first, second).items())
    )
    return Table(units={"field": "", "a": "", "b": ""}, rows=rows)


def _text(value: Any) -> Value:
    return value if isinstance(value, (int, float, str, bool)) or value is None else str(value)


def _fields(options: Params, first: Trace, second: Trace, traces: Traces) -> Table:
    """What each field of B is worth in A; only within one class, since fields of another mean other things."""
    if first.model.class_name != second.model.class_name:
        return Table(units=FIELD_UNITS, rows=())
    theirs = _spelt_as(first.model.config, second.model.config)
    sizes = {name: pair for name, pair in _differing(first, second).items() if name not in _NOT_SIZES}
    others = {name: b for name, (_, b) in sizes.items() if name in theirs}
    run = _costing_run(options, first)
    found: dict[str, Substituted | None] = traces.gather("substitution.gather_substitutions", others=others, run=run)
    own, *worth = (_costs(found[name]) for name in ("", *others))
    rows: list[dict[str, Value]] = [
        {
            "field": name,
            "a": _text(sizes[name][0]),
            "b": _text(sizes[name][1]),
            **{f"{cost}_delta": _delta(own[cost], value) for cost, value in costs.items()},
        }
        for name, costs in zip(others, worth, strict=True)
    ]
    return Table(units=FIELD_UNITS, rows=tuple(sorted(rows, key=_weight, reverse=True)))


def _costing_run(options: Params, record: Trace) -> RunShape:
    """One decoded token of a model that keeps a cache, else the run in which both are compared."""
    if not record.cache:
        return options.run_shape()
    return RunShape(phase="decode", seq=1, context=_cached(options), dtype=options.dtype)


def _costs(substituted: Substituted | None) -> dict[str, int | None]:
    """What a model holds and a token costs, by the name of its column."""
    names = ("params", "weight_bytes", "kv_bytes_per_token", "flops_per_token")
    if substituted is None:
        return dict.fromkeys(names)
    trace = substituted.trace
    if trace is None:
        return {**dict.fromkeys(names), "params": substituted.parameters}
    step = Step(trace)
    return {
        "params": substituted.parameters,
        "weight_bytes": step.weight_bytes,
        "kv_bytes_per_token": KvMemory(parts=step.parts).growth_at(trace.run.context) if trace.cache else None,
        "flops_per_token": (step.weight_flops() + step.attention_flops()) // (trace.run.batch * trace.run.seq),
    }


def _weight(row: dict[str, Value]) -> tuple[float, ...]:
    """The size of a row's differences, parameters first."""
    return tuple(abs(value) if isinstance(value := row[name], int) else 0 for name in list(FIELD_UNITS)[3:])


def _notes(options: Params, first: Trace, second: Trace) -> tuple[str, ...]:
    notes = [f"a is {first.model.id} ({first.model.source}); b is {second.model.id} ({second.model.source})"]
    classes = [one.model.class_name for one in (first, second)]
    if classes[0] != classes[1]:
        notes.append(
            f"no table `fields`: {classes[0]} and {classes[1]} are two classes, whose fields mean other things"
        )
    elif first.cache:
        notes.append(f"fields: a token is decoded with {_cached(options):,} cached ones, FLOPs as an engine runs it")
    return tuple(notes)


def _gemms(options: Params, both: tuple[Traces, Traces]) -> Table:
    """Rows of `trace` that only one of them has, or has in another number."""
    chosen = trace.Params(**_run_fields(options))
    counted = [_products(trace.analyze(chosen, traces).tables["gemms"]) for traces in both]
    names = ("module", "kind", "direction", "batch", "m", "k", "n")
    rows = tuple(
        {**dict(zip(names, key, strict=True)), "count_a": counted[0][key], "count_b": counted[1][key]}
        for key in dict.fromkeys((*counted[0], *counted[1]))
        if counted[0][key] != counted[1][key]
    )
    return Table(units=dict.fromkeys((*names, "count_a", "count_b"), ""), rows=rows)


def _products(table: Table) -> Counter[tuple[Value, ...]]:
    counts: Counter[tuple[Value, ...]] = Counter()
    for row in table.rows:
        key = tuple(row[name] for name in ("module", "kind", "direction", "batch", "m", "k", "n"))
        count = row["count"]
        counts[key] += count if isinstance(count, int) else 0
    return counts
