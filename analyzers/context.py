"""Show what a longer context costs, and how positions are told apart at that length.

For each `--context`: one prefill of that many tokens and one decode step on that many cached ones. `prefill_flops` has
the head on every position and attention over visible pairs; `prefill_engine_flops` the head on the last only.
`decode_flops` is what an engine executes for one token; `attention_passes_weights_at` is the context at which its
attention costs as much as its products with weights. `ttft_seconds` is the prefill's lower bound (as `roofline`).
`score_bytes_per_layer`: the H x S x S scores of one layer if they were stored (and then moved four times).
`flash_bytes_per_layer`: what FlashAttention moves instead: queries and results once, keys and values once for each
block of M/(4*D) query rows that fits M elements of on-chip memory, blocks that the mask hides left out; of order
H*S^2*D^2/M (arXiv:2205.14135).
Rotary wavelengths come from transformers' own initialisers at the longest context asked; `--rope` evaluates others
(linear = position interpolation, ntk = dynamic NTK, yarn, llama3) on the same base. `--window` with `--sinks`, and
`--chunk`, limit the attention of every full layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from introspect.analyzers._attention_pattern import Pattern
from introspect.analyzers._context_figure import context_figure
from introspect.analyzers._positions import Positions
from introspect.analyzers._roofline import Machine, machines, smallest, step_work, total_seconds
from introspect.analyzers._rope import check_scalings, incomplete_pairs, rope_table
from introspect.analyzers._step import Step
from introspect.errors import OptionError
from introspect.params import GpuParams, PlotParams, Traces, option
from introspect.records import Rope, RunShape
from introspect.table import Result, Table, Value, describe_model, describe_run

MODELS = "one"
EXAMPLES = (
    "introspect context meta-llama/Meta-Llama-3-8B --context 8192 --context 131072 --mfu 0.6",
    "introspect context meta-llama/Meta-Llama-3-8B --rope yarn:4 --rope llama3:8 --plot rope.svg",
    "introspect context mistralai/Mixtral-8x7B-v0.1 --context 131072 --window 4096 --sinks 4",
)

LENGTH_UNITS = {
    "context": "tokens",
    "kv_bytes": "B",
    "prefill_flops": "FLOP",
    "prefill_engine_flops": "FLOP",
    "prefill_attention_share": "share",
    "decode_flops": "FLOP",
    "decode_attention_flops": "FLOP",
    "gpu": "",
    "ttft_seconds": "s",
}
SCORE_UNITS = {"score_bytes_per_layer": "B", "flash_bytes_per_layer": "B"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(GpuParams, PlotParams):
    """Lengths, the GPU of the time bound, and what-ifs."""

    context: tuple[int, ...] = option((2048, 8192, 32768, 131072), "tokens, repeatable", short="c", metavar="N")
    dtype: str | None = option(None, "compute in this dtype instead of the config's", metavar="bf16|fp16|fp32|fp64")
    rope: tuple[str, ...] = option((), "what if: linear:4, ntk:4, yarn:4, llama3:8; repeatable", metavar="NAME:FACTOR")
    window: int | None = option(None, "what if: full layers see their last tokens only", metavar="TOKENS")
    sinks: int = option(0, "with --window: first tokens that stay visible", at_least=0, metavar="TOKENS")
    chunk: int | None = option(None, "what if: full layers see their own chunk only", metavar="TOKENS")
    sram_bytes: int = option(228 * 1024, "on-chip memory that one FlashAttention block may use", metavar="BYTES")


def analyze(params: Params, traces: Traces) -> Result:
    """A row for each length and GPU, the position encodings, and the what-ifs."""
    check_scalings(params.rope)
    patterns = _patterns(params)
    found, lengths = machines(params), tuple(dict.fromkeys(params.context))
    prefills = {n: Step(traces(_run("prefill", n, params.dtype))) for n in lengths}
    decodes = {n: Step(traces(_run("decode", n, params.dtype))) for n in lengths}
    longest = decodes[max(lengths)]
    positions = Positions(longest.structure)
    scaled = traces.gather("rope.gather_scaled_rope", length=max(lengths), scalings=params.rope) if params.rope else ()
    tables = {
        "lengths": Table(
            units=LENGTH_UNITS | SCORE_UNITS,
            rows=tuple(
                _row(prefills[n], decodes[n], machine) | _layer_bytes(prefills[n], params.sram_bytes)
                for n in lengths
                for machine in found
            ),
        ),
        "position": Table(units={"position": "", "layers": ""}, rows=_position_rows(positions)),
    }
    if longest.trace.rope:
        tables["rope"] = rope_table(longest.trace.rope, positions.layers_of)
    if scaled:
        tables["rope_what_if"] = rope_table(scaled, positions.layers_of)
    if patterns:
        rows = (
            {"variant": pattern.name, **_row(prefills[n], decodes[n], machine, pattern)}
            for pattern in patterns
            for n in lengths
            for machine in found
        )
        tables["what_if"] = Table(units={"variant": "", **LENGTH_UNITS}, rows=tuple(rows))
    return Result(
        command="context",
        model=describe_model(longest.trace),
        run=describe_run(longest.trace.run),
        totals=_totals(longest),
        tables=tables,
        assumptions=_assumptions(longest, found, params),
        notes=_notes(longest.trace.rope, scaled),
        unclassified=tuple(f"{one.op} in {one.module} ({one.count})" for one in longest.trace.unclassified),
        figure=context_figure(longest, scaled, lengths),
    )


def _run(phase: str, length: int, dtype: str | None) -> RunShape:
    if phase == "decode":
        return RunShape(phase="decode", seq=1, context=length, dtype=dtype)
    return RunShape(phase="prefill", seq=length, dtype=dtype)


def _patterns(params: Params) -> list[Pattern]:
    if params.sinks and params.window is None:
        raise OptionError("--sinks", params.sinks, "a --window for them to stay visible beside")
    patterns = []
    if params.window is not None:
        patterns.append(Pattern(window=params.window, sinks=params.sinks))
    if params.chunk is not None:
        patterns.append(Pattern(chunk=params.chunk))
    return patterns


def _row(prefill: Step, decode: Step, machine: Machine, pattern: Pattern | None = None) -> dict[str, Value]:
    context = decode.trace.run.context
    executed, engine, one_token = prefill.executed, prefill.engine, decode.engine
    if pattern is not None:
        executed, engine = (pattern.limit(products, prefill.trace.run) for products in (executed, engine))
        one_token = pattern.limit(one_token, decode.trace.run)
    weights = sum(product.flops * product.times for product in executed if product.weights)
    attention = sum(product.masked_flops * product.times for product in executed if not product.weights)
    held = sum(tensor.bytes_before for tensor in decode.trace.cache)
    return {
        "context": context,
        "kv_bytes": held if pattern is None else pattern.bytes_at(decode.parts, context),
        "prefill_flops": weights + attention,
        "prefill_engine_flops": sum(product.flops * product.times for product in engine),
        "prefill_attention_share": attention / (weights + attention) if weights + attention else None,
        "decode_flops": sum(product.flops * product.times for product in one_token),
        "decode_attention_flops": sum(product.flops * product.times for product in one_token if not product.weights),
        "gpu": machine.gpu.name,
        "ttft_seconds": total_seconds(step_work(prefill, engine), machine),
    }


def _layer_bytes(prefill: Step, sram_bytes: int) -> dict[str, Value]:
    """Scores of the widest attention call if stored, and FlashAttention's traffic instead; None without attention."""
    tensors = prefill.trace.tensors
    found = []
    for op in prefill.structure.graph.ops:
        if op.attention is not None:
            scores = op.gemms[0]
            width, element = tensors[op.attention.q].shape[-1], tensors[op.attention.q].bits // 8
            block = max(1, sram_bytes // element // (4 * width))
            passes = -(-scores.m // block)
            dense = scores.batch * scores.m * scores.n
            visible = op.attention.visible_pairs * op.attention.query_heads / dense
            flash = scores.batch * width * round(2 * scores.m + 2 * scores.n * passes * visible) * element
            found.append((dense * element, flash))
    scores_bytes, flash_bytes = max(found, default=(None, None))
    return {"score_bytes_per_layer": scores_bytes, "flash_bytes_per_layer": flash_bytes}


def _position_rows(positions: Positions) -> tuple[dict[str, Value], ...]:
    return tuple({"position": kind, "layers": layers} for kind, layers in positions.rows())


def _totals(step: Step) -> dict[str, Value]:
    weights = step.weight_flops()
    keys = sum(part.flops_per_key * (part.keys_read(step.trace.run.context) + 1) for part in step.parts)
    beside = step.attention_flops() - keys
    per_token = beside / (step.trace.run.context + 1) if any(part.kind == "index" for part in step.parts) else 0.0

    def attention(context: int) -> float:
        own = sum(part.flops_per_key * (part.keys_read(context) + 1) for part in step.parts)
        return own + (per_token * (context + 1) if per_token else beside)

    totals: dict[str, Value] = {
        "weight_flops_per_token": weights,
        "attention_passes_weights_at": smallest(lambda context: attention(context) >= weights),
    }
    for rope in step.trace.rope:
        name = "rope_pairs_incomplete" + (f"_{rope.layer_type}" if rope.layer_type else "")
        totals.setdefault(name, incomplete_pairs(rope))
    return totals


def _assumptions(step: Step, found: tuple[Machine, ...], params: Params) -> tuple[str, ...]:
    hardware = [line for machine in found for line in machine.assumptions(step.trace.run.dtype or "bf16")]
    flash = f"FlashAttention blocks use {params.sram_bytes:,} bytes of on-chip memory (--sram-bytes)"
    return (*dict.fromkeys(hardware), flash, *step.trace.assumptions)


def _notes(ropes: tuple[Rope, ...], scaled: tuple[Rope, ...]) -> tuple[str, ...]:
    notes = []
    for rope in (*ropes, *scaled):
        if (short := incomplete_pairs(rope)) is not None:
            kind = f" ({rope.layer_type})" if rope.layer_type else ""
            notes.append(
                f"{rope.rope_type}{kind}: {short} of {len(rope.inv_freq)} pairs never complete a turn in the "
                f"{rope.training_length:,} tokens of training"
            )
        if rope.attention_factor != 1.0:
            notes.append(
                f"{rope.rope_type} scales cosines and sines by {rope.attention_factor:.6g}, so scores by its square"
            )
    return tuple(dict.fromkeys(notes))
