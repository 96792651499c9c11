"""Lower bounds on a step's time on a GPU: what bounds each op, the ridge, and where decode turns compute-bound.

Each product and attention call takes max(FLOPs / peak, bytes / bandwidth), both scaled by --mfu and --mbu; `seconds` is
their sum. `seconds_floor` overlaps everything perfectly and reads only what no engine can avoid (of routed experts as
few as one token could use); `seconds_ceiling` is `seconds` when the tokens hit as many experts as they could;
`seconds_unfused` adds a round trip to memory for every element-wise op; `seconds_whole_weights` is the rule of
thumb that reads every parameter. `bound` compares all arithmetic of the step with all its traffic.
Work is the engine's: attention over visible pairs, the head on the last position, latent attention absorbed.

Crossover, decode: with F FLOPs and W weight bytes, a batch of B sequences is bound by compute when
B*F/peak >= W/bandwidth. With the cache, each sequence adds its own K bytes and A attention FLOPs at the context asked:
B*(F + A)/peak >= (W + B*K)/bandwidth, which no batch satisfies once (F + A)/peak <= K/bandwidth; the largest context
for which some batch does is `max_compute_bound_context`. Routed experts' W grows with B (expected distinct experts).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from introspect.analyzers._folding import Layer, layer_ranges
from introspect.analyzers._roofline import (
    Machine,
    Work,
    compulsory_bytes,
    compute_seconds,
    machines,
    smallest,
    step_work,
    total_seconds,
)
from introspect.analyzers._roofline_figure import roofline_figure
from introspect.analyzers._step import Step
from introspect.params import GpuParams, PlotParams, RunParams, Traces, option
from introspect.table import Result, Table, Value, describe_model, describe_run

MODELS = "one"
EXAMPLES = (
    "introspect roofline meta-llama/Meta-Llama-3-8B --phase decode --context 8192 --gpu h100-sxm --gpu a100-80g",
    "introspect roofline meta-llama/Meta-Llama-3-8B --seq 8192 --mfu 0.6 --plot roofline.svg",
)

GPU_UNITS = {
    "gpu": "",
    "ridge_flop_per_byte": "FLOP/B",
    "seconds": "s",
    "seconds_floor": "s",
    "seconds_ceiling": "s",
    "seconds_unfused": "s",
    "seconds_whole_weights": "s",
    "bound": "",
    "tokens_per_second": "tokens/s",
    "crossover_batch": "sequences",
    "crossover_batch_with_kv": "sequences",
    "crossover_fits": "",
    "max_compute_bound_context": "tokens",
    "max_batch": "sequences",
    "fits": "",
}
MEASURED_UNITS = {"measured_mfu": "share", "measured_mbu": "share"}
OP_UNITS = {
    "gpu": "",
    "module": "",
    "layers": "",
    "kind": "",
    "count": "",
    "flops": "FLOP",
    "bytes": "B",
    "intensity": "FLOP/B",
    "bound": "",
    "seconds": "s",
    "share": "share",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(RunParams, GpuParams, PlotParams):
    """A run, the GPUs, and a measured time to judge."""

    measured: float | None = option(None, "a measured time of this step in seconds: its MFU and MBU", above=0)


def analyze(params: Params, traces: Traces) -> Result:
    """Bounds of one step on each GPU, and of each op."""
    trace = traces(params.run_shape())
    step, found = Step(trace), machines(params)
    works = step_work(step)
    dtype = trace.run.dtype or "bf16"
    assumed = [line for machine in found for line in machine.assumptions(dtype)]
    return Result(
        command="roofline",
        model=describe_model(trace),
        run=describe_run(trace.run),
        totals={
            "flops": sum(work.flops for work in works),
            "weight_bytes": step.weight_bytes,
            "weight_bytes_read": step.weight_reads.expected,
            "weight_bytes_read_floor": step.weight_reads.floor,
            "weight_bytes_read_ceiling": step.weight_reads.ceiling,
            "kv_bytes_read": step.cache_traffic.read,
            "kv_bytes_written": step.cache_traffic.written,
        },
        tables={
            "gpus": Table(
                units=GPU_UNITS if params.measured is None else GPU_UNITS | MEASURED_UNITS,
                rows=tuple(_gpu_row(step, works, machine, params) for machine in found),
            ),
            "ops": Table(
                units=OP_UNITS, rows=tuple(row for machine in found for row in _op_rows(step, works, machine))
            ),
        },
        assumptions=(*dict.fromkeys(assumed), *trace.assumptions, *_routing(works)),
        notes=_notes(step, found, dtype),
        unclassified=tuple(f"{one.op} in {one.module} (x{one.count})" for one in trace.unclassified),
        figure=roofline_figure(trace, works, found),
    )


def _gpu_row(step: Step, works: tuple[Work, ...], machine: Machine, params: Params) -> dict[str, Value]:
    run = step.trace.run
    dtype = run.dtype or "bf16"
    seconds = total_seconds(works, machine)
    compute = compute_seconds(works, machine)
    crossover = _Crossover(step, works, machine) if run.phase == "decode" and compute is not None else None
    with_kv = crossover.batch_with_kv() if crossover else None
    room = machine.memory_bytes - step.weight_bytes
    each = sum(tensor.bytes_after for tensor in step.trace.cache) / run.batch
    max_batch = max(0, int(room // each)) if each else None
    ridge = machine.gpu.ridge(dtype)
    return {
        "gpu": machine.gpu.name,
        "ridge_flop_per_byte": None if ridge is None else ridge * machine.mfu / machine.mbu,
        "seconds": seconds,
        "seconds_floor": _larger(compute, machine.memory_seconds(compulsory_bytes(step, step.weight_reads.floor))),
        "seconds_ceiling": total_seconds(map(_most_experts, works), machine),
        "seconds_unfused": None if seconds is None else seconds + machine.memory_seconds(_elementwise_bytes(step)),
        "seconds_whole_weights": _larger(compute, machine.memory_seconds(compulsory_bytes(step, step.weight_bytes))),
        "bound": None if compute is None else _bound(works, compute, machine),
        "tokens_per_second": None if seconds is None else run.tokens / seconds,
        "crossover_batch": crossover.batch() if crossover else None,
        "crossover_batch_with_kv": with_kv,
        "crossover_fits": None if with_kv is None else step.weight_bytes + with_kv * each <= machine.memory_bytes,
        "max_compute_bound_context": crossover.max_context() if crossover else None,
        "max_batch": max_batch,
        "fits": step.weight_bytes + each * run.batch <= machine.memory_bytes,
        **_measured(works, machine, params.measured),
    }


def _larger(compute: float | None, memory: float) -> float | None:
    return None if compute is None else max(compute, memory)


def _most_experts(work: Work) -> Work:
    """The same work when no two tokens meet in an expert while there are others."""
    if work.experts is None:
        return work
    hit = min(work.experts.experts, work.experts.top_k * work.experts.tokens)
    return replace(work, weight_bytes=max(work.weight_bytes, work.expert_bytes * hit / work.experts.experts))


def _bound(works: tuple[Work, ...], compute: float, machine: Machine) -> str:
    return "compute" if compute >= machine.memory_seconds(sum(work.bytes for work in works)) else "memory"


def _measured(works: tuple[Work, ...], machine: Machine, seconds: float | None) -> dict[str, Value]:
    """Shares of the full peaks (not of --mfu and --mbu) that a measured step reached."""
    if seconds is None:
        return {}
    whole = Machine(gpu=machine.gpu)
    compute = compute_seconds(works, whole)
    return {
        "measured_mfu": None if compute is None else compute / seconds,
        "measured_mbu": whole.memory_seconds(sum(work.bytes for work in works)) / seconds,
    }


class _Crossover:
    """When decode turns compute-bound: work that all sequences share against work that each one adds."""

    def __init__(self, step: Step, works: tuple[Work, ...], machine: Machine) -> None:
        self.step, self.machine = step, machine
        self.weighted = [work for work in works if work.weights]
        self.sequences = step.trace.run.batch
        self.weight_compute = self._each(self.weighted)
        self.own_compute = self._each([work for work in works if not work.weights])

    def _each(self, works: list[Work]) -> float:
        seconds = compute_seconds(works, self.machine)
        assert seconds is not None, "rates were checked"
        return seconds / self.sequences

    def _weight_seconds(self, batch: int) -> float:
        return self.machine.memory_seconds(sum(work.weight_bytes_of(batch) for work in self.weighted))

    def batch(self) -> int | None:
        """Smallest batch whose products with weights are bound by compute; activations ignored."""
        return smallest(lambda batch: batch * self.weight_compute >= self._weight_seconds(batch))

    def batch_with_kv(self) -> int | None:
        """The same for the whole step, each sequence reading its own cache; None when no batch is large enough."""
        context = self.step.trace.run.context
        compute, memory = self.weight_compute + self.own_compute, self._own_memory(context)
        return smallest(lambda batch: batch * compute >= self._weight_seconds(batch) + batch * memory)

    def max_context(self) -> int | None:
        """Largest context at which a large enough batch is bound by compute; None when every context is."""
        beyond = smallest(lambda context: self.weight_compute + self._attention(context) < self._own_memory(context))
        return None if beyond is None else beyond - 1

    def _own_memory(self, context: int) -> float:
        bits = sum(part.read_bits * part.keys_read(context) for part in self.step.parts)
        return self.machine.memory_seconds(bits / 8 + 2 * sum(part.state_bytes for part in self.step.parts))

    def _attention(self, context: int) -> float:
        dtype = self.step.trace.run.dtype or "bf16"
        flops = sum(part.flops_per_key * (part.keys_read(context) + 1) for part in self.step.parts)
        return self.machine.compute_seconds(flops, dtype) or 0.0


def _elementwise_bytes(step: Step) -> int:
    """Operands and results of every op that is no product and no mere view, as if nothing were fused."""
    graph = step.structure.graph
    moved = 0
    for op, times in step.trace.walk():
        if not op.gemms and op.kind not in ("layout", "factory"):
            tensors = (graph.tensors[t] for t in (*op.inputs, *op.outputs))
            rows = {"lookup", "gather"}
            moved += times * sum(t.bytes for t in tensors if op.kind not in rows or t.role != "weight")
    return moved


def _op_rows(step: Step, works: tuple[Work, ...], machine: Machine) -> list[dict[str, Value]]:
    """Equal work of equal layers in one row, in order of first appearance."""
    folded: defaultdict[tuple[object, ...], list[tuple[Layer, Work]]] = defaultdict(list)
    for work in works:
        pattern, layer = _split(step, work.module)
        folded[pattern, work.kind, work.flops, work.bytes, work.dtype].append((layer, work))
    total = total_seconds(works, machine)
    rows: list[dict[str, Value]] = []
    for key, members in folded.items():
        layers, same = zip(*members, strict=True)
        each, count = same[0].seconds(machine), len(same)
        rows.append(
            {
                "gpu": machine.gpu.name,
                "module": str(key[0]),
                "layers": layer_ranges(layers),
                "kind": same[0].kind,
                "count": count * same[0].times,
                "flops": count * same[0].flops,
                "bytes": round(count * same[0].bytes),
                "intensity": same[0].flops / same[0].bytes if same[0].bytes else None,
                "bound": same[0].bound(machine),
                "seconds": None if each is None else count * each,
                "share": None if each is None or not total else count * each / total,
            }
        )
    return rows


def _split(step: Step, module: str) -> tuple[str, Layer]:
    if module.startswith("cache."):
        _, layer, name = module.split(".", 2)
        return f"cache.*.{name}", (int(layer),)
    return step.structure.layers.split(module)


def _routing(works: tuple[Work, ...]) -> tuple[str, ...]:
    if not any(work.experts and work.experts.top_k for work in works):
        return ()
    return ("routed experts read: the distinct ones expected when tokens choose independently and uniformly",)


def _notes(step: Step, found: tuple[Machine, ...], dtype: str) -> tuple[str, ...]:
    notes = [
        f"{machine.gpu.name} lists no {dtype} rate: its times are unknown (try --dtype or a --gpu-file)"
        for machine in found
        if machine.gpu.peak(dtype) is None
    ]
    unread = step.weight_bytes - step.weight_reads.expected
    if step.trace.run.phase == "decode" and unread > 0:
        notes.append(
            f"of {step.weight_bytes:,} bytes of weights one step reads {step.weight_reads.expected:,}: a lookup reads "
            "rows, not the table, and experts without tokens are not read; seconds_whole_weights reads all"
        )
    return tuple(notes)
