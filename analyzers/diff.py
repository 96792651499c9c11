"""Set two models side by side: config, parameters by part, products, cache, FLOPs, and which field made the difference.

`delta` is b - a. `fields` takes each differing field of B over into A alone and builds A again: `params_delta` is what
that one field is worth (null where A's class cannot be built with it); fields interact, so they need not add up.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from introspect.analyzers import kv, params, trace
from introspect.params import RunParams, Traces
from introspect.records import Trace
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
_NOT_SIZES = ("architectures", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "model_type")


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(RunParams):
    """The run in which both are compared."""


def analyze(options: Params, both: tuple[Traces, Traces]) -> Result:
    """Differences by component, field and product."""
    run = options.run_shape()
    first, second = both[0](run), both[1](run)
    return Result(
        command="diff",
        model=describe_model(first),
        run=describe_run(first.run),
        totals={
            "fields_differing": len(_differing(first, second)),
            **{f"{name}_delta": _delta(a, b) for name, (a, b) in _step_figures(options, both, (first, second)).items()},
        },
        tables={
            "components": _components(options, both),
            "step": _side_by_side("quantity", _step_figures(options, both, (first, second))),
            "config": _config(first, second),
            "fields": _fields(first, second, both[0]),
            "gemms": _gemms(options, both),
        },
        assumptions=tuple(dict.fromkeys((*first.assumptions, *second.assumptions))),
        notes=(f"a is {first.model.id} ({first.model.source}); b is {second.model.id} ({second.model.source})",),
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
    return kv.analyze(kv.Params(context=(max(options.seq, 1),), dtype=options.dtype), traces).totals["bytes_per_token"]


def _run_fields(options: Params) -> dict[str, Any]:
    return {name: getattr(options, name) for name in RunParams.__dataclass_fields__}


def _side_by_side(name: str, pairs: dict[str, tuple[Value, Value]]) -> Table:
    rows = tuple({name: key, "a": a, "b": b, "delta": _delta(a, b)} for key, (a, b) in pairs.items())
    return Table(units=dict.fromkeys((name, "a", "b", "delta"), ""), rows=rows)


def _delta(a: Value, b: Value) -> Value:
    numbers = isinstance(a, (int, float)) and isinstance(b, (int, float))
    return b - a if numbers else None  # type: ignore[operator]  # both are numbers here


def _differing(first: Trace, second: Trace) -> dict[str, tuple[Any, Any]]:
    a, b = first.model.config, second.model.config
    return {name: (a.get(name), b.get(name)) for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name)}


def _config(first: Trace, second: Trace) -> Table:
    rows = tuple(
        {"field": name, "a": _text(a), "b": _text(b)} for name, (a, b) in sorted(_differing(first, second).items())
    )
    return Table(units={"field": "", "a": "", "b": ""}, rows=rows)


def _text(value: Any) -> Value:
    return value if isinstance(value, (int, float, str, bool)) or value is None else str(value)


def _fields(first: Trace, second: Trace, traces: Traces) -> Table:
    """What each field of B is worth in A; only within one class, since fields of another mean other things."""
    units = {"field": "", "a": "", "b": "", "params_delta": ""}
    if first.model.class_name != second.model.class_name:
        return Table(units=units, rows=())
    sizes = {name: pair for name, pair in _differing(first, second).items() if name not in _NOT_SIZES}
    others = {name: b for name, (_, b) in sizes.items() if name in second.model.config}
    worth: dict[str, int | None] = traces.gather("substitution.gather_substitutions", others=others)
    ordered = sorted(worth.items(), key=lambda item: -abs(item[1] or 0))
    rows: list[dict[str, Value]] = [
        {"field": name, "a": _text(sizes[name][0]), "b": _text(sizes[name][1]), "params_delta": delta}
        for name, delta in ordered
    ]
    return Table(units=units, rows=tuple(rows))


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
