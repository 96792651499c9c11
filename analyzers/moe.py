"""Show what a mixture of experts holds, computes, reads and sends: three parameter counts, rows, all-to-all, balance.

`total` parameters are resident, `active` used by one token, `expected_read_params` read by this step: everything that
is multiplied, the looked-up rows, and of the routed experts E*(1 - (1 - k/E)^T), the distinct ones that T independent
uniform tokens reach on average (`expected_experts`; `simulated_experts` is what --routing drew). `rows_per_expert` is
the mean over all E experts. `imbalance` is the busiest expert's rows over the mean, `rank_imbalance` the busiest rank's
(--ep ranks of E/N neighbouring experts), both averaged over the layers; the table `policies` runs the step under each
policy. With --capacity-factor c an expert takes ceil(c*T*k/E) rows and the rest is dropped. Bytes sent are defined in
_moe_traffic.py.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import get_args

from introspect.analyzers import params as params_command
from introspect.analyzers._components import Components, Placed
from introspect.analyzers._folding import Layer, layer_ranges
from introspect.analyzers._labels import Labels
from introspect.analyzers._moe_balance import Balance, balance_of, expert_calls
from introspect.analyzers._moe_nodes import choice_of, nodes_met
from introspect.analyzers._moe_traffic import SENT, Dispatch
from introspect.analyzers._products import Product
from introspect.analyzers._roofline import machines
from introspect.analyzers._step import Step
from introspect.analyzers._traffic import expected_experts
from introspect.errors import OptionError, ShardingError, TraceShapeError
from introspect.params import GpuParams, RunParams, Traces, option
from introspect.records import ExpertCall, Routing, Trace
from introspect.table import Result, Table, Value, describe_model, describe_run

MODELS = "one"
EXAMPLES = (
    "introspect moe deepseek-ai/DeepSeek-V3 --phase decode --batch 32 --dispatch-dtype fp8",
    "introspect moe mistralai/Mixtral-8x7B-v0.1 --seq 4096 --routing zipf --capacity-factor 1.25",
    "introspect moe Qwen/Qwen3-235B-A22B --phase decode --batch 128 --ep 8 --nodes 2",
)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
DEGREES = (2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(RunParams, GpuParams):
    """Which step, how rows are sent, and over how many ranks the experts are spread."""

    dispatch_dtype: str = option("bf16", "rows to the experts are sent in this type", choices=tuple(SENT))
    combine_dtype: str = option("bf16", "rows back from the experts are sent in this type", choices=tuple(SENT))
    capacity_factor: float | None = option(None, "rows an expert takes, over the mean; the rest is dropped", above=0)
    ep: int = option(1, "expert-parallel ranks")
    nodes: int = option(1, "nodes that the ranks lie on (without --ep: a rank on each)")
    max_nodes_per_token: int | None = option(None, "nodes that a token's experts may lie on")


def analyze(params: Params, traces: Traces) -> Result:
    """Totals, experts, distinct experts by batch, and expert against tensor parallelism."""
    if params.ep == 1:  # nodes alone: one rank each
        params = replace(params, ep=params.nodes)
    step = Step(traces(params.run_shape()))
    trace = step.trace
    blocks = expert_calls(trace)
    if not blocks:
        raise OptionError(
            "MODEL", trace.model.id, "a model with routed experts: this one's record holds no expert call"
        )
    call = max(blocks.values(), key=lambda one: one.experts)
    _check_ranks(params, call)
    dispatch = _dispatch(step, call, params)
    placed = tuple(Components(Labels(step.structure)).placed())
    tables = {
        "experts": Table(units=EXPERT_UNITS, rows=tuple(_expert_rows(step))),
        "policies": Table(units=POLICY_UNITS, rows=tuple(_policy_rows(params, traces, call))),
        "batches": Table(units=BATCH_UNITS, rows=tuple(_batch_rows(step, placed, call))),
        "parallel": Table(units=PARALLEL_UNITS, rows=tuple(_parallel_rows(dispatch, call, params))),
    }
    notes = [f"expert parallelism sends less than tensor parallelism from {dispatch.wins_from_degree()} ranks on"]
    if call.routed is not None:
        notes.append(f"the code multiplies every expert by every token, {sum(call.rows)} rows; shown are those routed")
    if params.ep > 1:
        tables["collectives"], note = _executed(traces, params)
        notes.append(note)
    return Result(
        command="moe",
        model=describe_model(trace),
        run={**describe_run(trace.run), "ep": params.ep},
        totals=_totals(step, params, traces, blocks, dispatch, placed),
        tables=tables,
        assumptions=(
            *trace.assumptions,
            f"routing: {trace.run.routing}, seed {trace.run.seed}; expected experts: independent uniform choices",
            *(text for machine in machines(params) for text in machine.assumptions(str(trace.run.dtype))),
        ),
        notes=tuple(notes),
        unclassified=tuple(f"{op.op} in {op.module} ({op.count})" for op in trace.unclassified),
    )


def _check_ranks(params: Params, call: ExpertCall) -> None:
    if call.experts % params.ep:
        near = [n for n in range(1, call.experts + 1) if call.experts % n == 0]
        raise OptionError("--ep", params.ep, f"a divisor of the {call.experts} experts: {', '.join(map(str, near))}")
    if params.ep % params.nodes:
        raise OptionError("--nodes", params.nodes, f"a divisor of the {params.ep} ranks of --ep")


def _crossing(step: Step, dispatch: Dispatch, call: ExpertCall, params: Params) -> int:
    met = nodes_met(choice_of(step.structure, call), params.nodes)
    return dispatch.between_nodes(params.nodes, min(met, params.max_nodes_per_token or met))


EXPERT_UNITS = dict.fromkeys(
    ("module", "layers", "kind", "experts", "busy", "rows_per_expert", "rows_max", "k", "n", "count"), ""
)
POLICY_UNITS = dict.fromkeys(
    ("routing", "busy_experts", "rows_mean", "rows_max", "imbalance", "rank_imbalance", "slowest_rank_rows"), ""
) | {"dropped_share": "share"}
BATCH_UNITS = {"tokens": "", "expected_experts": "", "share": "share", "read_params": "", "read_bytes": "B"}
PARALLEL_UNITS = {
    "gpu": "",
    "ranks": "",
    "experts_per_rank": "",
    "ep_bytes_sent_per_rank": "B",
    "tp_bytes_sent_per_rank": "B",
    "ep_seconds": "s",
    "tp_seconds": "s",
    "less_sent": "",
}


def _dispatch(step: Step, call: ExpertCall, params: Params) -> Dispatch:
    first = next(p for p in step.executed if p.experts is not None and p.direction == "forward")
    return Dispatch(
        tokens=call.tokens,
        top_k=call.top_k,
        width=first.k,
        dispatch_dtype=params.dispatch_dtype,
        combine_dtype=params.combine_dtype,
        stream_dtype=first.dtype,
    )


def _totals(
    step: Step,
    params: Params,
    traces: Traces,
    blocks: dict[str, ExpertCall],
    dispatch: Dispatch,
    placed: tuple[Placed, ...],
) -> dict[str, Value]:
    call = max(blocks.values(), key=lambda one: one.experts)
    fields = {name: getattr(params, name) for name in RunParams.__dataclass_fields__}
    counted = params_command.analyze(params_command.Params(**fields), traces).totals
    balance, capacity = balance_of(step.trace, params.ep), _capacity(params, call)
    return {
        "total": counted["total"],
        "active": counted["active"],
        "routed_experts": counted["routed_experts"],
        "shared_experts": counted["shared_experts"],
        "router": counted["router"],
        "moe_layers": len(blocks),
        "experts": call.experts,
        "top_k": call.top_k,
        "expected_experts": expected_experts(call.experts, call.top_k, call.tokens),
        "simulated_experts": balance.busy_experts,
        "expected_read_params": round(_read_params(step, placed, call.tokens)),
        "dispatch_bytes_per_layer": dispatch.dispatch_bytes,
        "combine_bytes_per_layer": dispatch.combine_bytes,
        "scale_bytes_per_layer": dispatch.scale_bytes,
        "remote_share": (params.ep - 1) / params.ep,
        "node_crossing_bytes_per_layer": _crossing(step, dispatch, call, params),
        "tp_allreduce_bytes_per_layer": dispatch.tp_allreduce_bytes,
        "ep_wins_from_degree": dispatch.wins_from_degree(),
        "capacity_rows": capacity,
        "dropped_share": balance.dropped_share(capacity),
        "imbalance": balance.imbalance,
        "rank_imbalance": balance.rank_imbalance,
        "slowest_rank_rows": balance.slowest_rank_rows,
    }


def _capacity(params: Params, call: ExpertCall) -> int | None:
    """Rows that an expert takes; None when it takes all."""
    if params.capacity_factor is None:
        return None
    return ceil(params.capacity_factor * call.tokens * call.top_k / call.experts)


def _policy_rows(params: Params, traces: Traces, call: ExpertCall) -> Iterator[dict[str, Value]]:
    """The same step under each policy; a stored record answers for its own alone."""
    capacity = _capacity(params, call)
    for routing in get_args(Routing):
        try:
            balance = balance_of(traces(params.run_shape().with_(routing=routing)), params.ep)
        except TraceShapeError:
            continue
        yield {
            "routing": routing,
            "busy_experts": balance.busy_experts,
            "rows_mean": balance.rows_mean,
            "rows_max": balance.rows_max,
            "imbalance": balance.imbalance,
            "rank_imbalance": balance.rank_imbalance,
            "slowest_rank_rows": balance.slowest_rank_rows,
            "dropped_share": balance.dropped_share(capacity),
        }


def _read_params(step: Step, placed: tuple[Placed, ...], tokens: int) -> float:
    """Parameters that a step of `tokens` tokens reads: what is multiplied or applied whole, of a table that is only
    looked up one row a token, of routed experts the expected distinct ones."""
    multiplied = {path for product in step.executed for path, _ in product.weights}
    total = 0.0
    for one in placed:
        if not one.parameter.touched:
            continue
        if one.routed:
            k, experts = one.active_share
            total += one.parameter.count * expected_experts(experts, k, tokens) / experts
        elif one.component == "embedding" and one.parameter.path not in multiplied and len(one.parameter.shape) == 2:
            total += min(tokens, one.parameter.shape[0]) * one.parameter.shape[1]
        else:
            total += one.parameter.count
    return total


def _expert_rows(step: Step) -> Iterator[dict[str, Value]]:
    """Routed, shared and router products, those of all layers in one row: mean rows and busy experts, most rows."""
    structure = step.structure
    found: defaultdict[tuple[str, str, int, int, int], list[tuple[Layer, int, tuple[int, ...]]]] = defaultdict(list)
    for product in step.executed:
        kind = _kind(step, product)
        if kind is None or product.direction != "forward":
            continue
        load = product.experts.routed_rows if product.experts else (product.m,)
        module, layer = structure.layers.split(product.module)
        found[module, kind, len(load), product.k, product.n].append((layer, product.times, load))
    for (module, kind, experts, k, n), calls in found.items():
        balance = Balance(tuple(load for _, _, load in calls))
        yield {
            "module": module,
            "layers": layer_ranges(layer for layer, _, _ in calls),
            "kind": kind,
            "experts": experts,
            "busy": balance.busy_experts,
            "rows_per_expert": balance.rows_mean,
            "rows_max": balance.rows_max,
            "k": k,
            "n": n,
            "count": sum(times for _, times, _ in calls),
        }


def _kind(step: Step, product: Product) -> str | None:
    if product.experts is not None:
        return "routed"
    if product.op in step.structure.shared_experts:
        return "shared"
    return "router" if product.op in step.structure.router else None


def _batch_rows(step: Step, placed: tuple[Placed, ...], call: ExpertCall) -> Iterator[dict[str, Value]]:
    total = sum(one.parameter.count for one in placed)
    stored = sum(one.parameter.bytes for one in placed)
    for tokens in BATCHES:
        distinct = expected_experts(call.experts, call.top_k, tokens)
        read = _read_params(step, placed, tokens)
        yield {
            "tokens": tokens,
            "expected_experts": distinct,
            "share": distinct / call.experts,
            "read_params": round(read),
            "read_bytes": round(read * stored / total),
        }


def _parallel_rows(dispatch: Dispatch, call: ExpertCall, params: Params) -> Iterator[dict[str, Value]]:
    for machine in machines(params):
        rate = machine.gpu.interconnect_bytes_per_second
        for ranks in (n for n in DEGREES if call.experts % n == 0):
            ep, tp = dispatch.sent_by_rank(ranks), dispatch.tp_sent_by_rank(ranks)
            yield {
                "gpu": machine.gpu.name,
                "ranks": ranks,
                "experts_per_rank": call.experts // ranks,
                "ep_bytes_sent_per_rank": ep,
                "tp_bytes_sent_per_rank": tp,
                "ep_seconds": ep / rate if rate else None,
                "tp_seconds": tp / rate if rate else None,
                "less_sent": "expert parallel" if ep < tp else "tensor parallel",
            }


def _executed(traces: Traces, params: Params) -> tuple[Table, str]:
    """The exchange that transformers really makes, from a run over a fake group with split sizes from the policy."""
    units = {"kind": "", "module": "", "count": "", "payload_bytes": "B", "bytes": "B"}
    try:
        trace: Trace = traces(params.run_shape().with_(ep=params.ep))
    except ShardingError as error:
        return Table(units=units, rows=()), f"not executed: {error}"
    found: defaultdict[tuple[str, str, int], Counter[int]] = defaultdict(Counter)
    made: Counter[str] = Counter()  # exchanges of a module so far: counts of rows, rows out, rows back
    for op, times in trace.walk():
        if op.collective is not None:
            module = ".".join("*" if part.isdigit() else part for part in op.module.split("."))
            found[op.collective.kind, module, made[op.module]][op.collective.payload_bytes] += times
            made[op.module] += 1
    rows: list[dict[str, Value]] = [
        {
            "kind": kind,
            "module": module,
            "count": payloads.total(),
            "payload_bytes": sum(payload * count for payload, count in payloads.items()) / payloads.total(),
            "bytes": sum(payload * count for payload, count in payloads.items()),
        }
        for (kind, module, _), payloads in found.items()
    ]
    note = (
        "collectives: of one rank, each with the batch asked for; transformers' default on a shared batch: all-reduce"
    )
    return Table(units=units, rows=tuple(rows)), note
