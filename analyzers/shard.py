"""Show one rank of a sharded model: its products, weights, cache and collectives, and what those cost.

Two routes. transformers: the model's own plan (tp_plan, ep_plan), executed in a process group that exists in name only;
all figures are read from the record of rank 0. megatron: Megatron's rules on the dataflow of the unsharded record
(column then row, heads whole, KV heads held by several ranks where there are fewer, vocabulary cut and padded; see
docs/sharding.md); it answers for any model and any degree that divides. Without --engine the executed route is taken
where the plan shards attention and FFN, else Megatron's; `routes` shows both.
`bytes` of a collective is its payload, `wire_bytes_per_rank` what a rank sends: ring all-reduce 2(N-1)/N, all-gather,
reduce-scatter and all-to-all (N-1)/N of it. Times are lower bounds: wire bytes over the GPU's interconnect in one
direction, and the rank's products as an engine runs them; not overlapped, without latency.
--batch is what the ranks of one tensor-parallel group share; with --ep larger than --tp each group has its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from introspect.analyzers._collectives import interconnect_assumption, sequence_parallel
from introspect.analyzers._gemm_table import gemm_table
from introspect.analyzers._megatron import Degrees
from introspect.analyzers._pipeline import Stage, bubble_share, pipeline
from introspect.analyzers._products import fuse
from introspect.analyzers._rank import Rank
from introspect.analyzers._roofline import Machine, machines
from introspect.analyzers._routes import Routes, find_routes
from introspect.analyzers._shard_notes import option_notes, rank_notes, training_notes
from introspect.analyzers._shard_tables import (
    collective_table,
    gpu_table,
    parameter_table,
    route_table,
    stage_table,
    tile_table,
    time_table,
)
from introspect.errors import OptionError, ShardingError
from introspect.params import GpuParams, RunParams, Traces, option
from introspect.table import Result, Table, Value, describe_model, describe_run

MODELS = "one"
EXAMPLES = (
    "introspect shard meta-llama/Meta-Llama-3-70B --tp 8 --phase decode --batch 64 --fuse",
    "introspect shard deepseek-ai/DeepSeek-V3 --tp 8 --ep 32 --engine megatron --phase decode --batch 128",
    "introspect shard Qwen/Qwen3-32B --tp 4 --pp 2 --microbatches 8 --sequence-parallel --gpu h200",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(RunParams, GpuParams):
    """Degrees, the route, and what the engine does beyond it."""

    tp: int = option(1, "tensor-parallel ranks")
    ep: int = option(1, "ranks that share the routed experts: a multiple of --tp")
    pp: int = option(1, "pipeline stages")
    engine: str | None = option(
        None, "who decides what is cut: the model's own plan, or Megatron's rules", choices=("transformers", "megatron")
    )
    fuse: bool = option(False, "merge Linears of one parent module that read the same tensor")
    sequence_parallel: bool = option(False, "keep the residual stream scattered over the tokens between blocks")
    microbatches: int = option(1, "parts the batch is fed to the pipeline in")
    vocabulary_multiple: int = option(1, "pad a rank's part of the vocabulary to a multiple of this (Megatron-LM: 128)")


def analyze(params: Params, traces: Traces) -> Result:
    """One rank by the chosen route, of the slowest stage where there are several."""
    _check(params)
    degrees = Degrees(tp=params.tp, ep=params.ep, vocabulary_multiple=params.vocabulary_multiple)
    routes = find_routes(traces, params.run_shape(), degrees, params.engine)
    rank = routes.chosen
    if params.sequence_parallel:
        scattered = sequence_parallel(rank.transfers, rank.step.trace.run)
        rank = replace(rank, transfers=tuple(scattered))
    gpus = machines(params)
    stages = pipeline(rank, params.pp, scattered=params.tp if params.sequence_parallel else 1)
    slowest = max(range(params.pp), key=lambda stage: (stages[stage].seconds(gpus[0]) or 0.0, -stage))
    shown = stages[slowest] if params.pp > 1 else Stage(layers="", rank=rank)
    run = rank.step.trace.run.with_(tp=params.tp, ep=params.ep)
    return Result(
        command="shard",
        model=describe_model(rank.step.trace),
        run={**describe_run(run), "pp": params.pp, "route": rank.route},
        totals=_totals(params, shown, routes, stages, gpus[0]),
        tables=_tables(params, shown, routes, stages, gpus),
        assumptions=_assumptions(params, rank, gpus),
        notes=(*routes.notes, *_notes(params, rank, slowest)),
        unclassified=tuple(f"{one.op} in {one.module} ({one.count})" for one in rank.step.trace.unclassified),
    )


def _check(params: Params) -> None:
    if params.ep > 1 and params.ep % params.tp:
        raise ShardingError(f"tp {params.tp}, ep {params.ep}", "ep is no multiple of tp", "--ep a multiple of --tp")
    if params.batch % params.microbatches:
        raise OptionError(
            "--microbatches", params.microbatches, f"a divisor of the {params.batch} sequences of --batch"
        )


# --- totals, tables, words ------------------------------------------------------------------------------------------


def _totals(
    params: Params, stage: Stage, routes: Routes, stages: tuple[Stage, ...], machine: Machine
) -> dict[str, Value]:
    rank, transfers = stage.rank, stage.rank.transfers
    totals: dict[str, Value] = {
        "weight_bytes_per_rank": rank.weight_bytes,
        "weight_bytes_replicated_per_rank": rank.replicated_bytes,
        "weight_bytes_sharded_per_rank": rank.weight_bytes - rank.replicated_bytes,
        "weight_bytes": sum(share.whole_bytes for share in routes.chosen.shares),
        "kv_bytes_per_token_per_rank": rank.kv_bytes_per_token,
        "query_heads_per_rank": rank.query_heads,
        "kv_heads_per_rank": rank.kv_heads,
        "kv_replication": routes.kv_replication(params.tp),
        "collective_bytes_per_step": sum(t.times * t.payload_bytes for t in transfers),
        "wire_bytes_per_step": sum(t.times * t.wire_bytes for t in transfers),
        "gemm_seconds": stage.gemm_seconds(machine),
        "collective_seconds": stage.transfer_seconds(machine),
    }
    if params.pp > 1:
        times = [one.seconds(machine) for one in stages]
        known = [time for time in times if time is not None]
        totals["pp_bubble_share"] = bubble_share(params.pp, params.microbatches)
        totals["pp_imbalance"] = max(known) * len(known) / sum(known) if len(known) == params.pp else None
    return totals


def _tables(
    params: Params, stage: Stage, routes: Routes, stages: tuple[Stage, ...], gpus: tuple[Machine, ...]
) -> dict[str, Table]:
    rank = stage.rank
    layers = rank.step.structure.layers
    shown = fuse(rank.products) if params.fuse else rank.products
    tables = {
        "gemms": gemm_table(shown, layers),
        "collectives": collective_table(rank.transfers, layers),
        "parameters": parameter_table(rank, max(params.tp, params.ep)),
        "times": time_table(rank, gpus),
        "gpus": gpu_table(stage, gpus),
        "tiles": tile_table(shown, layers),
    }
    if params.pp > 1:
        tables["stages"] = stage_table(stages, gpus[0])
    if routes.executed is not None and routes.megatron is not None:
        tables["routes"] = route_table(routes.executed, routes.megatron)
    return tables


def _assumptions(params: Params, rank: Rank, gpus: tuple[Machine, ...]) -> tuple[str, ...]:
    trace = rank.step.trace
    found = [line for machine in gpus for line in machine.assumptions(trace.run.dtype or "bf16")]
    found += [interconnect_assumption(machine.gpu) for machine in gpus]
    if any(product.experts for product in rank.products):
        found.append(f"routing: {trace.run.routing}")
    if params.ep > params.tp:
        found.append(f"{params.ep // params.tp} groups of {params.tp} ranks, each with a batch as large as this one's")
    return (*found, *trace.assumptions)


def _notes(params: Params, rank: Rank, slowest: int) -> list[str]:
    scattered = params.sequence_parallel
    notes = rank_notes(rank, params.tp) + training_notes(rank, params.tp, params.ep, sequence_parallel=scattered)
    notes += option_notes(
        rank,
        params.tp,
        params.pp,
        sequence_parallel=scattered,
        microbatches=params.microbatches,
        multiple=params.vocabulary_multiple,
    )
    if params.pp > 1:
        notes.append(f"figures are of a rank of stage {slowest}, the slowest; the table of stages has all")
    return notes
