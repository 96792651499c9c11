"""Show what a mixture of experts computes, reads and sends: three parameter counts, rows per expert, EP against TP.

Router, shared and routed experts are told by the dataflow of the record. `total` are all parameters, `active` what one
token uses (embedding whole), `expected_read_params` what a step of this batch reads: of E experts, T tokens with k
choices each hit E*(1 - (1 - k/E)^T) distinct ones if they choose independently and uniformly, and the embedding gives
one row a token. The rows of each expert follow --routing: balanced; uniform and zipf draw scores for every router
(seeded) and let the model's own code choose, so that groups and limits of a router count.
`imbalance`: the busiest expert's rows over the mean; `rank_imbalance`: the same for --ep ranks that hold neighbouring
experts; both averaged over layers. `dispatch_bytes_per_layer`: every (token, routed expert) pair, those that stay on
their rank too, without scales. `tp_allreduce_bytes_per_layer`: a row of the stream for each token.
"""

from __future__ import annotations

from dataclasses import dataclass

from introspect.analyzers._collectives import interconnect_assumption, recorded_transfers
from introspect.analyzers._exchange import WIRE_FORMATS, Contest, Way, ways
from introspect.analyzers._experts import Block, Load, Parameters, blocks, load, parameters
from introspect.analyzers._moe_tables import (
    batch_table,
    contest_table,
    exchange_table,
    expert_table,
    policy_table,
)
from introspect.analyzers._placement import stream_width
from introspect.analyzers._roofline import machines
from introspect.analyzers._shard_tables import collective_table
from introspect.analyzers._step import Step
from introspect.analyzers._traffic import expected_experts
from introspect.errors import OptionError, ShardingError, TraceShapeError
from introspect.params import GpuParams, RunParams, Traces, option
from introspect.records import Trace
from introspect.table import Result, Table, Value, describe_model, describe_run
from introspect.units import DTYPE_BITS

MODELS = "one"
EXAMPLES = (
    "introspect moe deepseek-ai/DeepSeek-V3 --phase decode --batch 128 --ep 32 --dispatch-dtype fp8",
    "introspect moe mistralai/Mixtral-8x7B-v0.1 --seq 4096 --routing zipf --capacity-factor 1.25",
    "introspect moe deepseek-ai/DeepSeek-V3 --ep 64 --nodes 8 --max-nodes-per-token 4 --phase decode --batch 4096",
)
POLICIES = ("balanced", "uniform", "zipf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(RunParams, GpuParams):
    """A run of the whole batch, how its tokens choose, and the ranks that share the experts."""

    ep: int = option(1, "ranks that share the routed experts")
    nodes: int = option(1, "nodes those ranks stand in")
    max_nodes_per_token: int | None = option(None, "most nodes a token's experts may lie on (the router's own limit)")
    dispatch_dtype: str | None = option(
        None, "type tokens are sent in (default: the run's)", choices=tuple(WIRE_FORMATS)
    )
    combine_dtype: str | None = option(
        None, "type results are sent back in (default: the run's)", choices=tuple(WIRE_FORMATS)
    )
    capacity_factor: float | None = option(
        None, "rows an expert may take over the mean; the rest is dropped", above=0, metavar="F"
    )


def analyze(params: Params, traces: Traces) -> Result:
    """Totals and tables; only the parameter counts for a model without routed experts."""
    step = Step(traces(params.run_shape()))
    found, counted = blocks(step), parameters(step)
    if not found:
        return _without_experts(step, counted)
    first = found[0]
    _check(params, first)
    loads, notes = _loads(params, traces, found)
    chosen = load(found, params.ep)
    sent = ways(first, step.trace.run.tokens, *_wire_dtypes(params, step.trace))
    exchanges, refusal = _executed_exchange(params, traces)
    bits = DTYPE_BITS[step.trace.run.dtype or "bf16"]
    contest = Contest(block=first, dispatch=sent[0].dtype, combine=sent[1].dtype, bits=bits)
    gpus = machines(params)
    tables = {
        "experts": expert_table(step),
        "policies": policy_table(loads, first, params.capacity_factor),
        "batches": batch_table(step.trace.run, first, counted),
        "exchange": exchange_table(sent, params.ep, params.nodes, params.max_nodes_per_token, gpus),
        "ep_vs_tp": contest_table(contest, step.trace.run.tokens, gpus[0]),
    }
    if exchanges is not None:
        tables["collectives"] = exchanges
    return Result(
        command="moe",
        model=describe_model(step.trace),
        run=describe_run(step.trace.run.with_(ep=params.ep)),
        totals=_totals(params, step, found, counted, chosen, sent, contest),
        tables=tables,
        assumptions=(
            *_assumptions(params, step.trace, sent),
            *(interconnect_assumption(machine.gpu) for machine in gpus),
        ),
        notes=(*_kinds(found), *notes, *refusal),
        unclassified=tuple(f"{one.op} in {one.module} ({one.count})" for one in step.trace.unclassified),
    )


def _check(params: Params, block: Block) -> None:
    experts = block.call.experts
    if experts % params.ep:
        divisors = [n for n in range(1, experts + 1) if experts % n == 0]
        near = [max(n for n in divisors if n < params.ep), *(n for n in divisors if n > params.ep)][:2]
        raise ShardingError(
            f"ep {params.ep}", f"{experts} experts do not divide by {params.ep}", f"--ep {' or '.join(map(str, near))}"
        )
    if params.ep % params.nodes:
        raise OptionError("--nodes", params.nodes, f"a divisor of the {params.ep} ranks of --ep")


def _without_experts(step: Step, counted: Parameters) -> Result:
    names = (
        "top_k",
        "expected_experts",
        "simulated_experts",
        "dispatch_bytes_per_layer",
        "combine_bytes_per_layer",
        "tp_allreduce_bytes_per_layer",
        "capacity_rows",
        "dropped_share",
        "imbalance",
        "rank_imbalance",
    )
    read = round(counted.read(step.trace.run.tokens))
    return Result(
        command="moe",
        model=describe_model(step.trace),
        run=describe_run(step.trace.run),
        totals={"total": counted.total, "active": counted.active, "experts": 0, "expected_read_params": read}
        | dict.fromkeys(names),
        assumptions=step.trace.assumptions,
        notes=("this model has no routed experts: no product of its record is grouped by expert",),
    )


def _loads(params: Params, traces: Traces, found: tuple[Block, ...]) -> tuple[dict[str, Load], tuple[str, ...]]:
    """The load under each policy: the one asked for from this record, the others from runs of their own."""
    asked = params.run_shape()
    loads: dict[str, Load] = {}
    missing = []
    for policy in POLICIES:
        try:
            own = found if policy == asked.routing else blocks(Step(traces(asked.with_(routing=policy))))
            loads[policy] = load(own, params.ep)
        except TraceShapeError:
            missing.append(policy)
    return loads, (f"a stored trace has one routing: nothing is known of {', '.join(missing)}",) if missing else ()


def _wire_dtypes(params: Params, trace: Trace) -> tuple[str, str]:
    own = trace.run.dtype if trace.run.dtype in WIRE_FORMATS else "bf16"
    return params.dispatch_dtype or own or "bf16", params.combine_dtype or own or "bf16"


def _executed_exchange(params: Params, traces: Traces) -> tuple[Table | None, tuple[str, ...]]:
    """What transformers' own expert parallelism sends, executed for one rank's part of the batch."""
    if params.ep == 1:
        return None, ()
    asked = params.run_shape()
    run = asked.with_(batch=max(1, asked.batch // params.ep), ep=params.ep)
    try:
        trace = traces(run)
    except (ShardingError, TraceShapeError) as refusal:
        return None, (f"transformers' own expert parallelism was not run: {refusal}",)
    step = Step(trace)
    sent = [t for t in recorded_transfers(trace, stream_width(step.structure) or 0) if t.group == "ep"]
    note = (
        f"collectives: transformers' all-to-all, executed for one of {params.ep} ranks with a batch of {run.batch}; "
        "where the ranks share a batch it takes an all-reduce instead (introspect shard --tp N --ep N)"
    )
    return collective_table(sent, step.structure.layers), (note,)


def _totals(
    params: Params,
    step: Step,
    found: tuple[Block, ...],
    counted: Parameters,
    chosen: Load,
    sent: tuple[Way, Way],
    contest: Contest,
) -> dict[str, Value]:
    tokens, call, factor = step.trace.run.tokens, found[0].call, params.capacity_factor
    return {
        "total": counted.total,
        "active": counted.active,
        "expected_read_params": round(counted.read(tokens)),
        "experts": call.experts,
        "top_k": call.top_k,
        "layers": len(found),
        "expected_experts": expected_experts(call.experts, call.top_k, tokens),
        "simulated_experts": chosen.busy,
        "imbalance": chosen.imbalance,
        "rank_imbalance": chosen.rank_imbalance,
        "capacity_rows": None if factor is None else chosen.capacity(factor),
        "dropped_share": 0.0 if factor is None else chosen.dropped_share(factor),
        "experts_per_rank": call.experts // params.ep,
        "dispatch_bytes_per_layer": sent[0].payload_bytes,
        "combine_bytes_per_layer": sent[1].payload_bytes,
        "tp_allreduce_bytes_per_layer": tokens * found[0].width_out * contest.bits // 8,
        "ep_wins_from_degree": contest.winning_degree(tokens),
        "ep_wins_from_tokens": contest.winning_tokens(params.ep) if params.ep > 1 else None,
    }


def _assumptions(params: Params, trace: Trace, sent: tuple[Way, Way]) -> tuple[str, ...]:
    found = [f"routing: {trace.run.routing}; expected figures: independent uniform choices"]
    found += [f"{way.direction} in {way.dtype}" for way in sent]
    if params.nodes > 1:
        most = params.max_nodes_per_token
        limit = "as many nodes as its choices lie on" if most is None else f"at most {most} nodes"
        found.append(f"{params.nodes} nodes; a token is sent to {limit}")
    if trace.run.routing != "balanced":
        found.append("corrections of a router's scores are taken as zero")
    return (*found, *trace.assumptions)


def _kinds(found: tuple[Block, ...]) -> tuple[str, ...]:
    """Blocks that are unlike the first, which the totals describe."""
    kinds = {(block.call.experts, block.call.top_k, block.width_in) for block in found}
    if len(kinds) == 1:
        return ()
    return (f"blocks differ ({len(kinds)} kinds); totals per layer are of the first",)
