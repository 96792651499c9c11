"""Count what the cache holds, layer kind by layer kind, and how many tokens and sequences fit on a GPU.

Everything is read from the model's own cache object around one decode step at each `--context`: `bytes_per_token` is
what the step added, `state_bytes` what does not grow, `bytes_at_context` what it held. `reserved_bytes_at_context` is
what an engine reserves that keeps whole pages (`--page-size`) for sliding layers too. As MHA, GQA or MQA: the growing
layers with a key and a value for every query head, for 8 heads, for one. Capacity: (GPU memory x utilization - weights)
over the cache of one sequence; activations and the engine's own memory are not in it.
`decode_flop_per_byte`: FLOPs on each cached byte that attention reads, 2*H*(Dk + Dv) over the bytes of a cached token:
the group size for whole heads in 2-byte types, H*(2r + rope)/(r + rope) for a latent that is not expanded.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from introspect.analyzers._cache import Part
from introspect.analyzers._folding import layer_ranges
from introspect.analyzers._kv_memory import KV_FORMATS, KvMemory, per_rank, with_format
from introspect.analyzers._latent import latent_attention
from introspect.analyzers._latent_costs import LatentCosts, latent_table
from introspect.analyzers._megatron import Degrees
from introspect.analyzers._roofline import Machine, machines, smallest
from introspect.analyzers._routes import find_routes
from introspect.analyzers._step import Step
from introspect.params import MOST_TOKENS, GpuParams, Traces, option
from introspect.records import RunShape
from introspect.table import Result, Table, Value, describe_model, describe_run
from introspect.units import DTYPE_BITS

MODELS = "one"
EXAMPLES = (
    "introspect kv meta-llama/Meta-Llama-3-8B --context 8192 --context 131072 --gpu h100-sxm --utilization 0.9",
    "introspect kv deepseek-ai/DeepSeek-V3 --kv-dtype fp8",
    "introspect kv openai/gpt-oss-20b --sequences 64 --gpu a100-80g",
)

LAYER_UNITS = {
    "kind": "",
    "layers": "",
    "count": "",
    "dtype": "",
    "query_heads": "",
    "kv_heads": "",
    "group": "",
    "k_dim": "",
    "v_dim": "",
    "window": "tokens",
    "bytes_per_token": "B",
    "state_bytes": "B",
    "bytes_at_context": "B",
    "decode_flop_per_byte": "FLOP/B",
}
CAPACITY_UNITS = {
    "gpu": "",
    "context": "tokens",
    "weight_bytes": "B",
    "free_bytes": "B",
    "kv_bytes": "B",
    "max_tokens": "tokens",
    "max_sequences": "sequences",
    "max_sequences_reserved": "sequences",
    "max_context": "tokens",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(GpuParams):
    """Contexts, what an engine chooses for its cache, and the GPUs."""

    context: tuple[int, ...] = option(
        (2048,), "cached tokens per sequence, repeatable", short="c", metavar="N", at_least=0, at_most=MOST_TOKENS
    )
    dtype: str | None = option(None, "compute in this dtype instead of the config's", metavar="bf16|fp16|fp32|fp64")
    kv_dtype: str | None = option(None, "keep cached keys and values in this type", choices=tuple(KV_FORMATS))
    page_size: int = option(16, "tokens that an engine reserves at once")
    shared_prefix: int = option(0, "first tokens that all sequences share", at_least=0)
    sequences: int = option(1, "sequences whose longest common context is asked (max_context)")
    tp: int = option(1, "tensor-parallel ranks: capacity is then of one of them, cut by Megatron's rules")


def analyze(params: Params, traces: Traces) -> Result:
    """The cache at the first context, and the capacity at each."""
    steps = {context: _step(params, traces, context) for context in params.context}
    step = steps[params.context[0]]
    parts = with_format(step.parts, params.kv_dtype)
    weights = _weight_bytes(step, params, traces)
    latents = latent_attention(step.structure)
    tables = {
        "layers": Table(units=LAYER_UNITS, rows=_layer_rows(parts, params.context[0])),
        "capacity": Table(
            units=CAPACITY_UNITS,
            rows=tuple(
                _capacity_row(steps[context], machine, context, params, weights)
                for machine in machines(params)
                for context in params.context
            ),
        ),
    }
    totals = _totals(step, parts, params)
    if latents:
        bits = max(DTYPE_BITS[tensor.dtype] for tensor in step.trace.cache)
        costs = LatentCosts(calls=tuple(latents), element_bytes=bits // 8)
        tables["latent"] = latent_table(costs, params.context[0])
        totals["absorption_loses_from_query_length"] = costs.loses_from(params.context[0])
    return Result(
        command="kv",
        model=describe_model(step.trace),
        run=describe_run(step.trace.run),
        totals=totals,
        tables=tables,
        assumptions=_assumptions(step, params),
        notes=_notes(step, parts, params),
        unclassified=tuple(f"{one.op} in {one.module} ({one.count})" for one in step.trace.unclassified),
    )


def _step(params: Params, traces: Traces, context: int) -> Step:
    return Step(traces(RunShape(phase="decode", seq=1, context=context, dtype=params.dtype)))


def _totals(step: Step, parts: tuple[Part, ...], params: Params) -> dict[str, Value]:
    context = params.context[0]
    memory = KvMemory(parts=parts, page_size=params.page_size, shared_prefix=params.shared_prefix)
    return {
        "bytes_per_token": memory.growth_at(context),
        "state_bytes": sum(part.state_bytes for part in parts),
        "bytes_at_context": _held(step) if params.kv_dtype is None else memory.bytes_at(context),
        "reserved_bytes_at_context": memory.reserved_bytes_at(context),
        "bytes_per_token_as_mha": _as_heads(parts, context, None),
        "bytes_per_token_as_gqa8": _as_heads(parts, context, 8),
        "bytes_per_token_as_mqa": _as_heads(parts, context, 1),
    }


def _held(step: Step) -> int:
    return sum(tensor.bytes_before for tensor in step.trace.cache) // step.trace.run.batch


def _as_heads(parts: tuple[Part, ...], context: int, heads: int | None) -> int:
    """Growth if each growing attention layer cached keys and values of `heads` heads (None: of every query head)."""
    bits = 0
    for part in parts:
        if part.row_elements and part.query_heads and part.rows(context + 1) > part.rows(context):
            kept = part.query_heads if heads is None else min(heads, part.query_heads)
            bits += kept * ((part.k_dim or 0) + (part.v_dim or 0)) * part.row_bits // part.row_elements
    return -(-bits // 8)


def _layer_rows(parts: tuple[Part, ...], context: int) -> tuple[dict[str, Value], ...]:
    """Equal layers in one row, in order of first appearance."""
    folded: defaultdict[Part, list[Part]] = defaultdict(list)
    for part in parts:
        folded[replace(part, layer=())].append(part)
    return tuple(
        {
            "kind": kind.kind,
            "layers": layer_ranges(part.layer for part in same),
            "count": len(same),
            "dtype": kind.dtype,
            "query_heads": kind.query_heads,
            "kv_heads": kind.kv_heads,
            "group": kind.group,
            "k_dim": kind.k_dim,
            "v_dim": kind.v_dim,
            "window": kind.window,
            "bytes_per_token": len(same) * kind.growth_at(context),
            "state_bytes": len(same) * kind.state_bytes,
            "bytes_at_context": len(same) * kind.bytes_at(context),
            "decode_flop_per_byte": kind.flop_per_byte,
        }
        for kind, same in folded.items()
    )


def _weight_bytes(step: Step, params: Params, traces: Traces) -> int:
    """Bytes of all weights, or of one rank's. Raises ShardingError when heads do not divide."""
    if params.tp == 1:
        return step.weight_bytes
    return find_routes(traces, step.trace.run, Degrees(tp=params.tp), "megatron").chosen.weight_bytes


def _capacity_row(step: Step, machine: Machine, context: int, params: Params, weights: int) -> dict[str, Value]:
    parts = per_rank(with_format(step.parts, params.kv_dtype), params.tp)
    memory = KvMemory(parts=parts, page_size=params.page_size, shared_prefix=params.shared_prefix)
    free = int(machine.memory_bytes) - weights
    room = max(0, free)
    alone, own = memory.bytes_at(context), memory.own_bytes_at(context)
    left = max(0, room - memory.prefix_bytes(context))
    grows = any(part.row_bits for part in parts)
    beyond = smallest(lambda length: memory.total_bytes(length, params.sequences) > room) if grows else None
    return {
        "gpu": machine.gpu.name,
        "context": context,
        "weight_bytes": weights,
        "free_bytes": free,
        "kv_bytes": alone,
        "max_tokens": room * context // alone if grows and alone else None,
        "max_sequences": left // own if own else None,
        "max_sequences_reserved": room // memory.reserved_bytes_at(context) if alone else None,
        "max_context": None if beyond is None else beyond - 1,
    }


def _assumptions(step: Step, params: Params) -> tuple[str, ...]:
    found = [line for machine in machines(params) for line in machine.assumptions(step.trace.run.dtype or "bf16")]
    if params.kv_dtype is not None:
        found.append(f"cached keys and values in {params.kv_dtype}: {KV_FORMATS[params.kv_dtype].scales}")
    if params.tp > 1:
        found.append(f"{params.tp} ranks by Megatron's rules: cached heads split (at least one each), latents whole")
    return (*dict.fromkeys(found), *step.trace.assumptions)


def _notes(step: Step, parts: tuple[Part, ...], params: Params) -> tuple[str, ...]:
    notes = []
    if any(part.kind == "compressed" for part in parts):
        notes.append(
            "compressed layers add a row every few tokens: their bytes per token are the mean over the context"
        )
    if any(part.kind == "linear" or part.kind == "state" for part in parts):
        notes.append("states keep the model's own dtype whatever --kv-dtype says")
    if not any(tensor.shape_before for tensor in step.trace.cache):
        notes.append("this model keeps no cache between steps")
    return tuple(notes)
