"""Cost a training step: FLOPs of the recorded backward, optimiser states, ZeRO shards, activation bytes, MFU and HFU.

FLOPs are those of the recorded forward and backward: dX and dW of every product, attention dense, its fused backward
2.5 forwards because it computes the scores again. `model_flops_per_token` leaves that repetition out, and experts that
a token did not choose (Llama 4's code multiplies all); MFU divides by it (Chowdhery et al. 2022, appendix B). HFU
counts all that ran, with --checkpointing the recomputed layers too. States follow from each parameter's shape and dtype
(--optimizer). Activation bytes are what autograd really kept: unique saved storages that are no parameter. With
checkpointing they are the tensors at layer boundaries and the largest recomputed layer, from a second recorded step.
`gpus` adds nothing for the allocator, communication buffers or kernels' workspaces, so a rank that fits here may still
be tight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from introspect.analyzers._folding import Layer, layer_ranges
from introspect.analyzers._optimizers import FSDP_NAMES, RECIPES, SHARDED_ITEMS, bytes_per_rank
from introspect.analyzers._roofline import Machine, machines
from introspect.analyzers._saved import (
    fused_bytes,
    logits_bytes,
    materialised_bytes,
    megatron_bytes,
    saved_storages,
)
from introspect.analyzers._training import TrainingStep, flops_by_part, per_token
from introspect.params import GpuParams, Traces, TrainParams, option
from introspect.table import Result, Table, Value, describe_model, describe_run

MODELS = "one"
EXAMPLES = (
    "introspect train meta-llama/Meta-Llama-3-8B --seq 8192 --dp 8 --dp 64",
    "introspect train meta-llama/Meta-Llama-3-8B --tokens 15T --tokens-per-second 9000",
    "introspect train deepseek-ai/DeepSeek-V3 --seq 4096 --optimizer adam-8bit --checkpointing",
)

FLOP_UNITS = {"part": "", "flops": "FLOP", "flops_per_token": "FLOP", "relative_to_record": ""}
STATE_UNITS = {"item": "", "bytes": "B", "bytes_per_parameter": "B"}
RECIPE_UNITS = {"optimizer": "", "state_bytes": "B", "bytes_per_parameter": "B", "description": ""}
SHARD_UNITS = {"stage": "", "fsdp": "", "dp": "", "bytes_per_rank": "B"}
ACTIVATION_UNITS = {"method": "", "bytes": "B", "meaning": ""}
SAVED_UNITS = {"module": "", "layers": "", "op": "", "shape": "", "dtype": "", "count": "", "bytes": "B"}
GPU_UNITS = {
    "gpu": "",
    "stage": "",
    "dp": "",
    "state_bytes": "B",
    "activation_bytes": "B",
    "fits": "",
    "step_seconds": "s",
    "tokens_per_second": "tokens/s",
    "gpu_hours": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(TrainParams, GpuParams):
    """A step, how it is spread, and what was measured."""

    optimizer: str = option("adam", "what is kept for each parameter", choices=tuple(RECIPES))
    dp: tuple[int, ...] = option((8,), "data-parallel ranks that share the states, repeatable", metavar="N")
    tokens: int | None = option(None, "tokens of the whole training, for total_flops and GPU hours", metavar="N")
    tokens_per_second: float | None = option(
        None, "measured throughput of one GPU: its MFU and HFU", above=0, metavar="X"
    )
    checkpointing: bool = option(False, "recompute each layer in the backward pass (decides hfu and the gpus table)")


def analyze(params: Params, traces: Traces) -> Result:
    """Totals, states, shards, activations and what fits on each GPU."""
    step = TrainingStep(params.run_shape(), traces)
    states = RECIPES[params.optimizer].bytes(step.trained)
    found = machines(params)
    return Result(
        command="train",
        model=describe_model(step.plain),
        run=describe_run(step.plain.run),
        totals=_totals(params, step, states, found[0]),
        tables={
            "flops": _flops_table(step),
            "states": _states_table(step, states),
            "recipes": _recipes_table(step),
            "sharded_states": _shards_table(states, params.dp),
            "activations": _activations_table(step),
            "saved": _saved_table(step),
            "gpus": _gpus_table(params, step, states, found),
        },
        assumptions=(
            *dict.fromkeys(line for machine in found for line in machine.assumptions(step.dtype)),
            f"states: {RECIPES[params.optimizer].description}; every parameter that takes a gradient is trained",
            *step.plain.assumptions,
        ),
        notes=tuple(_notes(params, step, found[0])),
        unclassified=tuple(f"{op.op} in {op.module} ({op.count})" for op in step.plain.unclassified),
    )


def _totals(params: Params, step: TrainingStep, states: dict[str, int], machine: Machine) -> dict[str, Value]:
    recompute = step.recompute_flops_per_token
    executed = recompute if params.checkpointing else step.flops_per_token
    return {
        "flops_per_token": step.flops_per_token,
        "model_flops_per_token": step.model_flops_per_token,
        "flops_per_token_recompute": recompute,
        "total_flops": None if params.tokens is None else step.flops_per_token * params.tokens,
        "state_bytes": sum(states.values()),
        "activation_bytes": step.plain.saved_bytes,
        "activation_bytes_checkpointed": step.checkpointed_bytes,
        "logits_bytes": logits_bytes(step.plain),
        "mfu": _share(step.model_flops_per_token, params.tokens_per_second, machine, step.dtype),
        "hfu": _share(executed, params.tokens_per_second, machine, step.dtype),
    }


def _share(flops_per_token: float | None, rate: float | None, machine: Machine, dtype: str) -> float | None:
    peak = machine.gpu.peak(dtype)
    return None if flops_per_token is None or rate is None or peak is None else flops_per_token * rate / peak


def _flops_table(step: TrainingStep) -> Table:
    """The record by part, then the rules of thumb beside it."""
    total = sum(step.flops.values())
    rows: list[dict[str, Value]] = [_flops_row(part, count, step.tokens, None) for part, count in step.flops.items()]
    rows.append(_flops_row("record", total, step.tokens, 1.0))
    if step.unchosen_flops:
        needed = total - step.unchosen_flops
        rows.append(_flops_row("record, chosen experts alone", needed, step.tokens, needed / total))
    for rule, parameters in step.rules():
        count = 6 * parameters * step.tokens
        rows.append(_flops_row(f"6N, N = {rule}", count, step.tokens, count / total))
    if step.checkpointed is not None:
        recomputed = sum(flops_by_part(step.checkpointed).values())
        rows.append(_flops_row("record with checkpointing", recomputed, step.tokens, recomputed / total))
        for rule, parameters in step.rules():
            count = 8 * parameters * step.tokens
            rows.append(_flops_row(f"8N, N = {rule}", count, step.tokens, count / recomputed))
    return Table(units=FLOP_UNITS, rows=tuple(rows))


def _flops_row(part: str, count: int, tokens: int, relative: float | None) -> dict[str, Value]:
    return {"part": part, "flops": count, "flops_per_token": per_token(count, tokens), "relative_to_record": relative}


def _states_table(step: TrainingStep, states: dict[str, int]) -> Table:
    count = _parameter_count(step)
    rows: tuple[dict[str, Value], ...] = tuple(
        {"item": item, "bytes": held, "bytes_per_parameter": held / count if count else 0.0}
        for item, held in states.items()
    )
    return Table(units=STATE_UNITS, rows=rows)


def _recipes_table(step: TrainingStep) -> Table:
    trained, count = step.trained, _parameter_count(step)
    sums = {name: sum(recipe.bytes(trained).values()) for name, recipe in RECIPES.items()}
    rows: tuple[dict[str, Value], ...] = tuple(
        {
            "optimizer": name,
            "state_bytes": held,
            "bytes_per_parameter": held / count if count else 0.0,
            "description": RECIPES[name].description,
        }
        for name, held in sums.items()
    )
    return Table(units=RECIPE_UNITS, rows=rows)


def _parameter_count(step: TrainingStep) -> int:
    return sum(p.count for p in step.plain.parameters if not p.buffer and p.tied_to is None)


def _shards_table(states: dict[str, int], ranks: Iterable[int]) -> Table:
    rows: tuple[dict[str, Value], ...] = tuple(
        {"stage": stage, "fsdp": FSDP_NAMES[stage], "dp": dp, "bytes_per_rank": bytes_per_rank(states, stage, dp)}
        for dp in ranks
        for stage in SHARDED_ITEMS
    )
    return Table(units=SHARD_UNITS, rows=rows)


def _activations_table(step: TrainingStep) -> Table:
    plain = step.plain
    found: tuple[tuple[str, int | None, str], ...] = (
        ("saved", plain.saved_bytes, "what autograd kept of the recorded step"),
        ("fused", fused_bytes(plain), "the same with every attention in one fused kernel"),
        ("materialised", materialised_bytes(plain), "the same with scores stored, keys and values expanded"),
        ("checkpointed", step.checkpointed_bytes, "layer boundaries, what lies outside layers, the largest layer"),
        ("megatron_formula", megatron_bytes(step.structure), "s*b*h*(34 + 5*a*s/h) for each attention, scores stored"),
    )
    rows: tuple[dict[str, Value], ...] = tuple(
        {"method": method, "bytes": held, "meaning": meaning} for method, held, meaning in found
    )
    return Table(units=ACTIVATION_UNITS, rows=rows)


def _saved_table(step: TrainingStep) -> Table:
    """Kept storages of equal layers in one row, largest first."""
    folded: defaultdict[tuple[object, ...], list[tuple[Layer, int]]] = defaultdict(list)
    for one in saved_storages(step.plain):
        pattern, layer = step.structure.layers.split(one.module)
        folded[pattern, one.op, one.shape, one.dtype].append((layer, one.bytes))
    rows: list[dict[str, Value]] = []
    for (module, op, shape, dtype), members in folded.items():
        layers, sizes = zip(*members, strict=True)
        rows.append(
            {
                "module": str(module),
                "layers": layer_ranges(layers),
                "op": str(op),
                "shape": list(shape),  # type: ignore[call-overload]  # a tuple of integers
                "dtype": str(dtype),
                "count": len(members),
                "bytes": sum(sizes),
            }
        )
    return Table(units=SAVED_UNITS, rows=tuple(sorted(rows, key=lambda row: -int(str(row["bytes"])))))


def _gpus_table(params: Params, step: TrainingStep, states: dict[str, int], found: tuple[Machine, ...]) -> Table:
    rows = tuple(
        _gpu_row(params, step, machine, stage, dp, bytes_per_rank(states, stage, dp))
        for machine in found
        for dp in params.dp
        for stage in SHARDED_ITEMS
    )
    return Table(units=GPU_UNITS, rows=rows)


def _gpu_row(params: Params, step: TrainingStep, machine: Machine, stage: str, dp: int, held: int) -> dict[str, Value]:
    executed = step.recompute_flops_per_token if params.checkpointing else step.flops_per_token
    activations = step.checkpointed_bytes if params.checkpointing else step.plain.saved_bytes
    seconds = None if executed is None else machine.compute_seconds(executed * step.tokens, step.dtype)
    hours = None if seconds is None or params.tokens is None else params.tokens / step.tokens * seconds / 3600
    return {
        "gpu": machine.gpu.name,
        "stage": stage,
        "dp": dp,
        "state_bytes": held,
        "activation_bytes": activations,
        "fits": None if activations is None else held + activations <= machine.memory_bytes,
        "step_seconds": seconds,
        "tokens_per_second": None if seconds is None else dp * step.tokens / seconds,
        "gpu_hours": hours,
    }


def _notes(params: Params, step: TrainingStep, machine: Machine) -> Iterable[str]:
    yield "step_seconds is arithmetic at peak x --mfu; a rank holds its states and the activations of its own step"
    executed = step.recompute_flops_per_token if params.checkpointing else step.flops_per_token
    reached = _share(executed, params.tokens_per_second, machine, step.dtype)
    if reached is not None and reached > 1:
        yield f"hfu is above 1: no {machine.gpu.name} runs this step at {params.tokens_per_second:g} tokens/s"
    if step.unchosen_flops:
        unchosen = per_token(step.unchosen_flops, step.tokens)
        yield (
            f"this code multiplies experts that a token did not choose: {unchosen:,} FLOP a token that MFU leaves out "
            "and that HFU and step_seconds count"
        )
    noise = [
        step.plain.tensors[op.outputs[0]] for op, _ in step.plain.walk() if "bernoulli" in op.name and not op.backward
    ]
    if noise:
        more = sum(tensor.bytes - tensor.elements for tensor in noise)
        yield f"dropout keeps its noise in the compute dtype here; a GPU's kernel keeps 1 B masks, {more:,} B less"
    if step.checkpointed is None:
        yield f"no step with checkpointing is known: {step.problem}"
    else:
        yield "torch stops recomputing a layer once all it saved is back, so its last product is not repeated"
