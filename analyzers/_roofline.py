"""Lower bounds on time: each piece of work needs its arithmetic and its memory traffic, and cannot beat the slower one.

    seconds >= max(flops / (peak x mfu), bytes / (bandwidth x mbu))

(the roofline model, Williams, Waterman and Patterson 2009). Work is what a serving engine runs (_engine.py). A product
moves its weights or cached keys and values, its input and its result, once each; a state is read and written. What
passes between the products of fused attention, of a scan or of linear attention is not moved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from introspect.analyzers._products import Product
from introspect.analyzers._step import Step
from introspect.analyzers._traffic import expected_experts
from introspect.gpus import Gpu, find_gpus
from introspect.params import GpuParams
from introspect.records import ExpertCall
from introspect.units import number_text

FAR = 2**40
"""Beyond any batch or context: a search that gets here has no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A GPU and the assumed share of its peaks that is reached."""

    gpu: Gpu
    mfu: float = 1.0
    mbu: float = 1.0
    utilization: float = 1.0

    @property
    def memory_bytes(self) -> float:
        """Bytes that may be used."""
        return self.gpu.memory_bytes * self.utilization

    def compute_seconds(self, flops: float, dtype: str) -> float | None:
        """Time of this arithmetic; None when the GPU's rate for the dtype is unknown."""
        if not flops:
            return 0.0
        peak = self.gpu.peak(dtype)
        return None if peak is None else flops / (peak * self.mfu)

    def memory_seconds(self, transferred: float) -> float:
        """Time of moving these bytes."""
        return transferred / (self.gpu.bandwidth_bytes_per_second * self.mbu)

    def assumptions(self, dtype: str) -> tuple[str, ...]:
        """The hardware figures an answer rests on."""
        peak = self.gpu.peak(dtype)
        rate = "no known rate" if peak is None else f"{number_text(peak, 'FLOP/s')} dense"
        return (
            f"{self.gpu.name}: {rate} in {dtype}, {number_text(self.gpu.bandwidth_bytes_per_second, 'B/s')}, "
            f"{number_text(self.gpu.memory_bytes, 'B')} ({self.gpu.source_url})",
            f"share reached of peak {self.mfu:g} (--mfu), of bandwidth {self.mbu:g} (--mbu), of memory "
            f"{self.utilization:g} (--utilization)",
        )


def machines(params: GpuParams) -> tuple[Machine, ...]:
    """The GPUs asked for. Raises UnknownGpuError or GpuFileError."""
    return tuple(
        Machine(gpu=gpu, mfu=params.mfu, mbu=params.mbu, utilization=params.utilization)
        for gpu in find_gpus(params.gpu, params.gpu_file)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One op with products, or a state that is read and written; all figures of its `times` runs together.

    `weight_bytes` of routed experts are the expected distinct ones; `expert_bytes` is then what all of them hold.
    """

    module: str
    kind: str
    dtype: str
    times: int
    flops: int
    weight_bytes: float = 0.0
    cache_bytes: int = 0
    activation_bytes: int = 0
    experts: ExpertCall | None = None
    expert_bytes: float = 0.0
    weights: tuple[str, ...] = ()  # parameters it multiplies by

    @property
    def bytes(self) -> float:
        """Everything it moves."""
        return self.weight_bytes + self.cache_bytes + self.activation_bytes

    def weight_bytes_of(self, tokens: int) -> float:
        """Weights it reads for another number of tokens: only routed experts depend on it."""
        if self.experts is None or not self.experts.top_k:
            return self.weight_bytes
        return (
            self.expert_bytes
            * expected_experts(self.experts.experts, self.experts.top_k, tokens)
            / self.experts.experts
        )

    def seconds(self, machine: Machine) -> float | None:
        """The larger of its two bounds; None when the rate of its dtype is unknown."""
        compute = machine.compute_seconds(self.flops, self.dtype)
        return None if compute is None else max(compute, machine.memory_seconds(self.bytes))

    def bound(self, machine: Machine) -> str | None:
        """Which of the two it is."""
        compute = machine.compute_seconds(self.flops, self.dtype)
        if compute is None:
            return None
        return "compute" if compute >= machine.memory_seconds(self.bytes) else "memory"


def step_work(step: Step, products: Iterable[Product] | None = None) -> tuple[Work, ...]:
    """All work of a step: one entry an op, products of one attention call together, then what no product reads.

    `products` replace the engine's own (what-ifs).
    """
    own = [_work(found) for found in _by_op(step.engine)]
    shown = own if products is None else [_work(found) for found in _by_op(products)]
    return (*shown, *_parameters(step, own), *_held(step))


def _by_op(products: Iterable[Product]) -> Iterable[list[Product]]:
    found: defaultdict[tuple[int, int], list[Product]] = defaultdict(list)
    for index, product in enumerate(products):
        found[product.op, 0 if product.op >= 0 else index].append(product)
    return found.values()


def _work(found: list[Product]) -> Work:
    """The products of one op. Scores and probabilities of attention, and whatever passes between the products of a scan
    or of linear attention, stay on the chip."""
    first, times = found[0], found[0].times
    attention = first.attention is not None or first.kind in ("attention_qk", "attention_pv")
    operands = sum(product.rhs_bytes for product in found) * times
    call = first.experts if first.weights and first.kind == "grouped" else None
    every_expert = operands / first.batch * call.experts if call is not None and first.batch else 0.0
    weights: float = operands if first.weights else 0
    if call is not None and call.top_k:
        weights = every_expert * expected_experts(call.experts, call.top_k, call.tokens) / call.experts
    return Work(
        module=first.module,
        kind="attention" if attention else first.kind,
        dtype=first.dtype,
        times=times,
        flops=sum(product.flops for product in found) * times,
        weight_bytes=weights,
        cache_bytes=operands if attention else 0,
        activation_bytes=sum(_activations(product, attention) for product in found) * times,
        experts=call,
        expert_bytes=every_expert,
        weights=tuple(path.partition(" ")[0] for product in found for path, _ in product.weights),  # "(keys)" of a half
    )


def _activations(product: Product, attention: bool) -> int:
    """Bytes of input and result that are moved."""
    if attention:  # queries in, results out
        return product.lhs_bytes if product.kind == "attention_qk" else product.out_bytes
    return product.lhs_bytes + product.out_bytes if product.weights else 0


def _parameters(step: Step, works: Iterable[Work]) -> Iterator[Work]:
    """What the step reads of parameters that no product does: norms and decays as weights, looked-up rows as inputs."""
    graph = step.structure.graph
    multiplied = {path for work in works for path in work.weights}
    rows = sum(
        times * graph.tensors[op.outputs[0]].bytes
        for op, times in zip(graph.ops, graph.times, strict=True)
        if op.kind in ("lookup", "gather")
        and any(graph.tensors[t].role == "weight" and graph.tensors[t].parameter not in multiplied for t in op.inputs)
    )
    beside = step.weight_reads.expected - sum(work.weight_bytes for work in works)
    if beside > 0:
        yield Work(
            module="parameters outside products",
            kind="parameters",
            dtype=step.trace.run.dtype or "bf16",
            times=1,
            flops=0,
            weight_bytes=max(0.0, beside - rows),
            activation_bytes=round(min(rows, beside)),
        )


def _held(step: Step) -> Iterator[Work]:
    """Cache tensors that no attention reads as keys: states, read and written, and the keys of an indexer, read."""
    for kind, tensors in (("state", step.states), ("index", step.index_keys)):
        for tensor in tensors:
            yield Work(
                module=f"cache.{tensor.layer}.{tensor.name}",
                kind=kind,
                dtype=tensor.dtype,
                times=1,
                flops=0,
                cache_bytes=tensor.bytes_before + (tensor.bytes_after if kind == "state" else 0),
            )


def total_seconds(works: Iterable[Work], machine: Machine) -> float | None:
    """Sum of the bounds of all pieces, run one after the other; None when any rate is unknown."""
    bounds = [work.seconds(machine) for work in works]
    return None if None in bounds else sum(bound for bound in bounds if bound is not None)


def compute_seconds(works: Iterable[Work], machine: Machine) -> float | None:
    """Arithmetic alone, perfectly overlapped with everything else."""
    parts = [machine.compute_seconds(work.flops, work.dtype) for work in works]
    return None if None in parts else sum(part for part in parts if part is not None)


def compulsory_bytes(step: Step, weights: int) -> int:
    """Bytes no engine can avoid: `weights` once, the cached keys that are attended, states, and what is appended.

    Activations may stay on the chip; a key that the step itself made need not be read back.
    """
    attended = sum(work.cache_bytes for work in step_work(step) if work.kind == "attention")
    beside = sum(tensor.bytes_before for tensor in (*step.states, *step.index_keys))
    return weights + min(attended, step.cache_traffic.read - beside) + beside + step.cache_traffic.written


def smallest(holds: Callable[[int], bool]) -> int | None:
    """The smallest positive integer from which a condition holds; None when it does not hold below FAR.

    The condition must not become false again once it is true.
    """
    high = 1
    while not holds(high):
        high *= 2
        if high > FAR:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
