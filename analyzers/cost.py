"""Give the one-page cost of a model on a GPU: what it holds, what a token costs, how many GPUs, how fast at best.

Bounds are those of `roofline`, for weights in the checkpoint's own format (products in its type where the GPU has a
rate for it), spread evenly over as many GPUs as those weights need, without communication. `decode_seconds`: one
sequence at `--context`. `max_batch`: sequences of that context that fit beside the weights; `best_tokens_per_second`:
the bound of that batch, all GPUs together. `prefill_8k_seconds`: a prompt of 8192 tokens.
`terms`: how each quantity grows, solved from traces at contexts 65536 and 131072 (beyond the windows of today's
models), at one and two sequences, and from prompts of 8192, 16384 and 32768 tokens. FLOPs are a serving engine's.
`decode_bytes` has one sequence's expected experts in `constant`; more sequences read more distinct ones. `wire_bytes`
is what one of `--tp` ranks sends in a decode step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from introspect.analyzers._components import Components
from introspect.analyzers._labels import Labels
from introspect.analyzers._megatron import Degrees
from introspect.analyzers._quantised import natively
from introspect.analyzers._roofline import Machine, Work, machines, step_work, total_seconds
from introspect.analyzers._routes import find_routes
from introspect.analyzers._step import Step
from introspect.analyzers._terms import COLUMNS, Points, decode_terms, prefill_terms
from introspect.native_record import NativeFormat
from introspect.params import GpuParams, Traces, option
from introspect.records import RunShape
from introspect.table import Result, Table, Value, describe_model, describe_run

MODELS = "many"
GATHER = "native_formats"
EXAMPLES = (
    "introspect cost meta-llama/Meta-Llama-3-8B --gpu h100-sxm --gpu a100-80g",
    "introspect cost meta-llama/Meta-Llama-3-70B mistralai/Mixtral-8x7B-v0.1 deepseek-ai/DeepSeek-V3 --utilization 0.9",
)

FAR, FARTHER = 65536, 131072
PROMPTS = (8192, 16384, 32768)
GPU_UNITS = {
    "gpu": "",
    "gpus_needed": "GPUs",
    "decode_seconds": "s",
    "max_batch": "sequences",
    "best_tokens_per_second": "tokens/s",
    "prefill_8k_seconds": "s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(GpuParams):
    """The context of decode, and the GPUs."""

    context: int = option(2048, "cached tokens per sequence in decode", short="c")
    dtype: str | None = option(None, "compute in this dtype instead of the config's", metavar="bf16|fp16|fp32|fp64")
    tp: int = option(1, "tensor-parallel ranks whose traffic wire_bytes shows, by Megatron's rules")


def analyze(params: Params, traces: tuple[Traces, ...], natives: tuple[NativeFormat | None, ...]) -> tuple[Result, ...]:
    """One result a model."""
    return tuple(_Cost(params, one, native).result() for one, native in zip(traces, natives, strict=True))


class _Cost:
    """The runs of one model that its cost is read from."""

    def __init__(self, params: Params, traces: Traces, native: NativeFormat | None) -> None:
        self.params, self.traces, self.native = params, traces, native
        self.decode = cache(self._decode)
        self.prefill = cache(self._prefill)
        self.near = self.decode(1, params.context)
        known = native is not None and native.problem is None
        self.stored = natively(native, self.near.structure) if native is not None and known else None

    def _decode(self, batch: int, context: int) -> Step:
        run = RunShape(phase="decode", batch=batch, seq=1, context=context, dtype=self.params.dtype)
        return Step(self.traces(run))

    def _prefill(self, length: int) -> Step:
        return Step(self.traces(RunShape(phase="prefill", seq=length, dtype=self.params.dtype)))

    def result(self) -> Result:
        """Totals, a row for each GPU, and the terms."""
        trace, found = self.near.trace, machines(self.params)
        dtype = trace.run.dtype or "bf16"
        hardware = [line for machine in found for line in machine.assumptions(dtype)]
        return Result(
            command="cost",
            model=describe_model(trace),
            run=describe_run(trace.run),
            totals=self._totals(),
            tables={
                "gpus": Table(units=GPU_UNITS, rows=tuple(self._gpu_row(machine) for machine in found)),
                "terms": Table(units=COLUMNS, rows=self._terms()),
            },
            assumptions=(
                *dict.fromkeys(hardware),
                "several GPUs: weights, cache and work split evenly, communication free",
                *trace.assumptions,
            ),
            notes=self._notes(),
            unclassified=tuple(f"{one.op} in {one.module} ({one.count})" for one in trace.unclassified),
        )

    def _notes(self) -> tuple[str, ...]:
        if self.native is None:
            return ()
        if self.native.problem is not None:
            return (
                f"stored in {self.native.method}, unknown here: {self.native.problem}; GPUs and times are for bf16",
            )
        return (f"weights as {self.native.method} stores them ({self.native.route})", *self.native.notes)

    def _totals(self) -> dict[str, Value]:
        near, far = self.near, self.decode(1, FARTHER)
        placed = list(Components(Labels(near.structure)).placed())
        used = [one for one in placed if one.parameter.touched]
        return {
            "params": sum(one.parameter.count for one in placed),
            "active_params": sum(one.parameter.count * one.active_share[0] // one.active_share[1] for one in used),
            "weight_bytes": near.weight_bytes,
            "weight_bytes_native": self._native_bytes(),
            "weight_flops_per_token": near.weight_flops(),
            "kv_bytes_per_token": sum(tensor.bytes_after - tensor.bytes_before for tensor in near.trace.cache),
            "kv_bytes_at_128k": sum(tensor.bytes_before for tensor in far.trace.cache),
        }

    def _native_bytes(self) -> int | None:
        if self.native is None:
            return self.near.weight_bytes
        return None if self.stored is None else self.stored.weight_bytes

    def _works(self, step: Step, machine: Machine) -> tuple[Work, ...]:
        works = step_work(step)
        return works if self.stored is None else self.stored.works(works, machine)

    def _gpu_row(self, machine: Machine) -> dict[str, Value]:
        near, weights = self.near, self._native_bytes() or self.near.weight_bytes
        needed = max(1, math.ceil(weights / machine.memory_bytes))
        each = sum(tensor.bytes_after for tensor in near.trace.cache)
        batch = int((needed * machine.memory_bytes - weights) // each) if each else None
        works = self._works(near, machine)
        alone = total_seconds(works, machine)
        together = total_seconds([_batched(work, batch) for work in works], machine) if batch else None
        prefill = total_seconds(self._works(self.prefill(PROMPTS[0]), machine), machine)
        return {
            "gpu": machine.gpu.name,
            "gpus_needed": needed,
            "decode_seconds": None if alone is None else alone / needed,
            "max_batch": batch,
            "best_tokens_per_second": batch * needed / together if batch and together else None,
            "prefill_8k_seconds": None if prefill is None else prefill / needed,
        }

    def _terms(self) -> tuple[dict[str, Value], ...]:
        points = Points(near=self.params.context, far=FAR, farther=FARTHER)
        weights = sum(work.weight_bytes for work in step_work(self.near))

        def held(batch: int, context: int) -> int:
            step = self.decode(batch, context)
            return step.weight_bytes + sum(tensor.bytes_before for tensor in step.trace.cache)

        def flops(batch: int, context: int) -> int:
            step = self.decode(batch, context)
            return step.weight_flops() + step.attention_flops()

        def moved(batch: int, context: int) -> int:
            return sum(work.cache_bytes + work.activation_bytes for work in step_work(self.decode(batch, context)))

        def prompt(length: int) -> int:
            step = self.prefill(length)
            return step.weight_flops() + step.attention_flops()

        def sent(batch: int, context: int) -> int:
            run = self.decode(batch, context).trace.run
            rank = find_routes(self.traces, run, Degrees(tp=self.params.tp), "megatron").chosen
            return sum(transfer.times * transfer.wire_bytes for transfer in rank.transfers)

        traffic = decode_terms(moved, points)
        wire = decode_terms(sent if self.params.tp > 1 else lambda batch, context: 0, points)
        return (
            {"quantity": "memory_bytes", "unit": "B", **decode_terms(held, points)},
            {"quantity": "decode_flops", "unit": "FLOP", **decode_terms(flops, points)},
            {"quantity": "decode_bytes", "unit": "B", **traffic, "constant": round(weights)},
            {"quantity": "prefill_flops", "unit": "FLOP", **prefill_terms(prompt, PROMPTS)},
            {"quantity": "wire_bytes", "unit": "B", **wire},
        )


def _batched(work: Work, batch: int) -> Work:
    """One sequence's work as a batch of sequences does it."""
    return replace(
        work,
        flops=work.flops * batch,
        weight_bytes=work.weight_bytes_of(batch),
        cache_bytes=work.cache_bytes * batch,
        activation_bytes=work.activation_bytes * batch,
    )
