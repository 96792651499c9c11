"""Count what low-rank adapters add: trained parameters, states, FLOPs, activation bytes, and what the base then takes.

An adapter of rank r beside a matrix [N, K] is B [N, r] times A [r, K]: r*(N + K) parameters, and as many more
multiply-adds a token (Hu et al. 2021). `--target attention` means every Linear of a token mixer, `all-linear` every
Linear but the head, which is PEFT's rule for classes; any other value is a pattern or the end of a module's path.
Stacked experts and routers that are no Linears get none: a note says what PEFT's target_parameters would add for the
stacks, which PEFT chooses by itself for some model types (Mixtral's and Qwen2-MoE's kind), router included. Training
figures come from a recorded step with the base frozen and the adapters in place: no weight gradients of the base, and
fewer activations. `--base` is the format the frozen base is kept in (nf4: QLoRA, Dettmers et al. 2023); products then
still run in the model's dtype.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from introspect.analyzers._folding import layer_ranges
from introspect.analyzers._optimizers import RECIPES, Trained
from introspect.analyzers._quantised import in_format, quantisable
from introspect.analyzers._roofline import machines
from introspect.analyzers._training import TrainingStep, flops_by_part, per_token, second_step
from introspect.errors import OptionError
from introspect.formats import load_formats
from introspect.params import GpuParams, Traces, TrainParams, option
from introspect.records import Parameter, Trace
from introspect.table import Result, Table, Value, describe_model, describe_run
from introspect.units import DTYPE_BITS

MODELS = "one"
EXAMPLES = (
    "introspect lora meta-llama/Meta-Llama-3-8B --rank 16 --target attention",
    "introspect lora meta-llama/Meta-Llama-3-70B --rank 64 --base nf4 --seq 4096 --gpu h100-sxm",
    "introspect lora mistralai/Mixtral-8x7B-v0.1 --target q_proj --target v_proj --adapters 100",
)

MATRIX_UNITS = {
    "module": "",
    "layers": "",
    "count": "",
    "rank": "",
    "n": "",
    "k": "",
    "params": "",
    "extra_flops_share": "share",
}
SERVING_UNITS = {"adapters": "", "merged_bytes": "B", "unmerged_bytes": "B", "extra_flops_share": "share"}
GPU_UNITS = {"gpu": "", "base_bytes": "B", "state_bytes": "B", "activation_bytes": "B", "train_bytes": "B", "fits": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(TrainParams, GpuParams):
    """Which adapters, on what base, in which training step."""

    rank: int = option(16, "rank of each adapter")
    target: tuple[str, ...] = option(
        ("all-linear",), "which Linears get one, repeatable", metavar="attention|all-linear|PATTERN"
    )
    base: str = option("bf16", "format of the frozen base", choices=tuple(load_formats()))
    adapters: tuple[int, ...] = option((1, 16, 256), "adapters served beside each other, repeatable", metavar="N")


@dataclass(frozen=True, slots=True)
class _Target:
    """A Linear that gets an adapter: its path, that of its parameter, and its matrix [n, k]."""

    path: str
    weight: str
    n: int
    k: int

    def params(self, rank: int) -> int:
        """Parameters of its adapter."""
        return rank * (self.n + self.k)


def analyze(params: Params, traces: Traces) -> Result:
    """Totals, the adapted matrices, serving with several adapters, and what fits."""
    run = params.run_shape()
    step = TrainingStep(run, traces)
    targets = _targets(params, step)
    patterns = tuple(dict.fromkeys(step.structure.layers.split(target.path)[0] for target in targets))
    tuned, problem = second_step(run.with_(lora_rank=params.rank, lora_targets=patterns), traces)
    totals = _totals(params, step, targets, tuned)
    return Result(
        command="lora",
        model=describe_model(step.plain),
        run=describe_run(step.plain.run),
        totals=totals,
        tables={
            "matrices": _matrix_table(params, step, targets),
            "serving": _serving_table(params, step, targets, totals),
            "gpus": _gpu_table(params, totals),
        },
        assumptions=(
            *dict.fromkeys(line for machine in machines(params) for line in machine.assumptions(step.dtype)),
            f"adapters in {step.dtype}; states: {RECIPES['adam'].description}",
            *step.plain.assumptions,
        ),
        notes=tuple(_notes(params, step, targets, problem)),
        unclassified=tuple(f"{op.op} in {op.module} ({op.count})" for op in step.plain.unclassified),
    )


def _targets(params: Params, step: TrainingStep) -> tuple[_Target, ...]:
    """The Linears that get an adapter. OptionError for a target that names none, and without any target."""
    if not params.target:
        raise OptionError("--target", params.target, "attention, all-linear, or a pattern of a Linear's path")
    parameters = {p.path: p for p in step.plain.parameters}
    components = {one.parameter.path: one.component for one in step.placed}
    graph = step.structure.graph
    heads = {path for i in step.structure.heads for gemm in graph.ops[i].gemms for path in graph.gemm_weights(i, gemm)}
    weights = {path: parameters[f"{path}.weight"] for path in step.plain.linears if f"{path}.weight" in parameters}
    chosen: dict[str, Parameter] = {}
    for target in params.target:
        found = {
            path: weight
            for path, weight in weights.items()
            if _is_meant(target, path, components.get(weight.path), is_head=_owner(weight) in heads)
        }
        if not found:
            some = ", ".join(sorted({path.rpartition(".")[2] for path in weights})[:12])
            raise OptionError("--target", target, f"attention, all-linear, or a pattern of a Linear's path (as {some})")
        chosen |= found
    conv = {path for path, kind in step.plain.modules.items() if kind == "Conv1D"}
    return tuple(
        _Target(path, _owner(weight), *(reversed(weight.shape) if path in conv else weight.shape))
        for path, weight in chosen.items()
    )


def _owner(weight: Parameter) -> str:
    return weight.tied_to or weight.path


def _is_meant(target: str, path: str, component: str | None, *, is_head: bool) -> bool:
    if target == "attention":
        return component == "attention"
    if target == "all-linear":
        return not is_head
    return fnmatchcase(path, target) or path == target or path.endswith(f".{target}")


def _totals(params: Params, step: TrainingStep, targets: tuple[_Target, ...], tuned: Trace | None) -> dict[str, Value]:
    count = sum(target.params(params.rank) for target in targets)
    whole = sum(p.count for p in step.plain.parameters if not p.buffer and p.tied_to is None)
    forward = sum(flops for part, flops in step.flops.items() if part.endswith("forward"))
    multiplied = frozenset().union(*step.structure.matrices.values())  # a vision tower's Linears are not run on text
    running = sum(target.params(params.rank) for target in targets if target.weight in multiplied)
    shapes = [
        Parameter(path="", shape=(target.params(params.rank),), dtype=step.dtype, touched=True) for target in targets
    ]
    base = in_format(params.base, load_formats()[params.base], quantisable(step.structure), step.structure)
    return {
        "params": count,
        "share": count / whole,
        "adapter_bytes": sum(shape.bytes for shape in shapes),
        "state_bytes": sum(RECIPES["adam"].bytes(Trained(shape) for shape in shapes).values()),
        "base_bytes": base.weight_bytes,
        "extra_flops_share": 2 * running * step.tokens / forward,
        "flops_per_token": None if tuned is None else per_token(sum(flops_by_part(tuned).values()), step.tokens),
        "flops_per_token_full": step.flops_per_token,
        "activation_bytes": None if tuned is None else tuned.saved_bytes,
        "activation_bytes_full": step.plain.saved_bytes,
    }


def _matrix_table(params: Params, step: TrainingStep, targets: Iterable[_Target]) -> Table:
    folded: defaultdict[tuple[str, int, int], list[_Target]] = defaultdict(list)
    for target in targets:
        folded[step.structure.layers.split(target.path)[0], target.n, target.k].append(target)
    rows: tuple[dict[str, Value], ...] = tuple(
        {
            "module": module,
            "layers": layer_ranges(step.structure.layers.split(target.path)[1] for target in same),
            "count": len(same),
            "rank": params.rank,
            "n": n,
            "k": k,
            "params": sum(target.params(params.rank) for target in same),
            "extra_flops_share": same[0].params(params.rank) / (n * k),
        }
        for (module, n, k), same in folded.items()
    )
    return Table(units=MATRIX_UNITS, rows=rows)


def _serving_table(params: Params, step: TrainingStep, targets: tuple[_Target, ...], totals: dict[str, Value]) -> Table:
    """Merged, each adapter is a model of its own and costs no FLOPs; unmerged, all share one base."""
    base = in_format(params.base, load_formats()[params.base], quantisable(step.structure), step.structure).weight_bytes
    own = sum(target.params(params.rank) for target in targets) * DTYPE_BITS[step.dtype] // 8
    rows: tuple[dict[str, Value], ...] = tuple(
        {
            "adapters": number,
            "merged_bytes": number * base,
            "unmerged_bytes": base + number * own,
            "extra_flops_share": totals["extra_flops_share"],
        }
        for number in params.adapters
    )
    return Table(units=SERVING_UNITS, rows=rows)


def _gpu_table(params: Params, totals: dict[str, Value]) -> Table:
    rows: list[dict[str, Value]] = []
    for machine in machines(params):
        base, states, activations = (totals[name] for name in ("base_bytes", "state_bytes", "activation_bytes"))
        assert isinstance(base, int)
        assert isinstance(states, int)
        total = base + states + activations if isinstance(activations, int) else None
        rows.append(
            {
                "gpu": machine.gpu.name,
                "base_bytes": base,
                "state_bytes": states,
                "activation_bytes": activations,
                "train_bytes": total,
                "fits": None if total is None else total <= machine.memory_bytes,
            }
        )
    return Table(units=GPU_UNITS, rows=tuple(rows))


def _notes(params: Params, step: TrainingStep, targets: Iterable[_Target], problem: str) -> Iterable[str]:
    covered = {f"{target.path}.weight" for target in targets}
    experts = {path for i in step.structure.experts for path in step.structure.matrices.get(i, ())} - covered
    if experts:
        stacks = [one.matrix for one in quantisable(step.structure) if one.path in experts]
        more = sum(params.rank * stack.count * (stack.rows + stack.columns) for stack in stacks)
        yield (
            f"not covered: {', '.join(sorted({step.structure.layers.split(path)[0] for path in experts}))}: stacked "
            f"experts are no Linears; PEFT's target_parameters would add {more:,} parameters, an adapter of rank "
            f"{params.rank} an expert (where it turns all-linear into them, twice that rank for a fused gate and up, "
            "and the router too)"
        )
    yield "extra_flops_share: of the forward's products, unmerged; a merged adapter costs none"
    if problem:
        yield f"the step with adapters is not known: {problem}"
