"""Compare number formats for the weights: bytes with every scale, what is kept high, and what each GPU gains.

Every matrix of a layer is stored as the format's own library stores it: packed weights, scales, zero points, indices
and tables are counted to the byte, from their shapes (introspect/data/formats.json). Kept high are embedding, head,
norms, biases, routers and what --keep names. `native` is the checkpoint's own quantization_config, by transformers'
quantiser on meta where it can run without weights, else by its settings; null when the layout is not known, the
config's dtype when it names none and for what stays unquantised. Checkpoints may hold more (MTP layers) than the model
that transformers builds.

Times are lower bounds of roofline's kind. A weight-only format changes the bytes that are read and computes in the
model's dtype, so prefill does not gain; W8A8 and fp8 compute at that type's peak where the GPU has one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from introspect.analyzers._folding import layer_ranges
from introspect.analyzers._kv_memory import KV_FORMATS, KvMemory, with_format
from introspect.analyzers._quantised import Quantisable, Quantised, in_format, kept, names, natively, quantisable
from introspect.analyzers._roofline import Machine, Work, machines, step_work, total_seconds
from introspect.analyzers._step import Step
from introspect.errors import OptionError, TraceShapeError
from introspect.formats import Format, load_formats, load_recipes
from introspect.native_record import NativeFormat
from introspect.params import GpuParams, Traces, option
from introspect.records import RunShape
from introspect.table import Result, Table, Value, describe_model, describe_run

MODELS = "one"
GATHER = "native_format"
EXAMPLES = (
    "introspect quant meta-llama/Meta-Llama-3-70B --gpu h100-sxm --gpu l40s",
    "introspect quant meta-llama/Meta-Llama-3-8B --keep '*down_proj*' --kv-dtype fp8",
    "introspect quant deepseek-ai/DeepSeek-V3 --only native --only fp8-channel",
)
YARDSTICK = "int4-g128"  # the format whose matrices are priced one by one when none is asked for

FORMAT_UNITS = {
    "format": "",
    "bits_per_weight": "",
    "params": "",
    "packed_bytes": "B",
    "scale_bytes": "B",
    "kept_bytes": "B",
    "weight_bytes": "B",
    "ratio_to_bf16": "",
    "about": "",
}
GPU_UNITS = {
    "format": "",
    "gpu": "",
    "fits": "",
    "gpus_needed": "",
    "kv_tokens": "tokens",
    "compute": "",
    "decode_seconds": "s",
    "decode_gain": "",
    "prefill_seconds": "s",
    "prefill_gain": "",
}
KEEP_UNITS = {
    "format": "",
    "module": "",
    "layers": "",
    "params": "",
    "share": "share",
    "bytes": "B",
    "extra_bytes_if_kept": "B",
    "kept": "",
}
RECIPE_UNITS = {
    "recipe": "",
    "format": "",
    "weights": "",
    "activations": "",
    "products": "",
    "kept": "",
    "source": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(GpuParams):
    """Which formats, what stays high, and the two steps that are timed."""

    only: tuple[str, ...] = option((), "show only this format, repeatable", choices=(*load_formats(), "native"))
    keep: tuple[str, ...] = option((), "keep these parameters high, repeatable, as '*o_proj*'", metavar="PATTERN")
    kv_dtype: str | None = option(None, "keep cached keys and values in this type", choices=tuple(KV_FORMATS))
    batch: int = option(1, "sequences", short="b")
    seq: int = option(2048, "prompt tokens per sequence of the prefill step", short="s")
    context: int = option(2048, "cached tokens per sequence of the decode step", short="c")
    dtype: str | None = option(
        None, "the dtype of what is not quantised (fp32 configs: bf16)", metavar="bf16|fp16|fp32|fp64"
    )


def analyze(params: Params, traces: Traces, native: NativeFormat | None) -> Result:
    """Bytes of each format, what it does on each GPU, and the price of keeping each kind of matrix."""
    steps = _Dtypes.of(params, traces)
    step = steps.usual.any
    matrices = quantisable(step.structure)
    _check_patterns(params, step, matrices)
    formats = _formats(params, steps, matrices, native)
    found = machines(params)
    return Result(
        command="quant",
        model=describe_model(step.trace),
        run=describe_run(step.trace.run),
        totals={
            "params": sum(p.count for p in step.trace.parameters if not p.buffer and p.tied_to is None),
            "quantised_params": sum(one.matrix.elements for one in matrices if not kept(one, params.keep)),
        },
        tables={
            "formats": _format_table(formats, steps.plain),
            "gpus": _gpu_table(params, formats, steps, found),
            "keep": _keep_table(params, step, matrices),
            "recipes": Table(units=RECIPE_UNITS, rows=tuple(dict(row) for row in load_recipes())),
        },
        assumptions=(
            *dict.fromkeys(line for machine in found for line in machine.assumptions(steps.usual.dtype)),
            *_assumptions(params, step),
        ),
        notes=tuple(_notes(params, native)),
        unclassified=tuple(f"{op.op} in {op.module} ({op.count})" for op in step.trace.unclassified),
    )


def _check_patterns(params: Params, step: Step, matrices: tuple[Quantisable, ...]) -> None:
    """OptionError for a --keep that names no parameter at all (one that stays high anyway may be named)."""
    paths = {parameter.path for parameter in step.trace.parameters}
    for pattern in params.keep:
        if not any(names(pattern, path) for path in paths):
            some = sorted({one.path.removesuffix(".weight").rpartition(".")[2] for one in matrices})[:12]
            expected = f"a pattern of a parameter's path, as '*o_proj*'; quantised here are {', '.join(some) or 'none'}"
            raise OptionError("--keep", pattern, expected)


@dataclass(frozen=True, slots=True)
class _Steps:
    """The two steps that are timed, in one dtype; None where a stored record is of another run."""

    decode: Step | None
    prefill: Step | None

    @classmethod
    def of(cls, params: Params, traces: Traces, dtype: str | None) -> _Steps:
        """Run both. TraceShapeError when a stored record is of neither."""
        decode = RunShape(phase="decode", seq=1, batch=params.batch, context=params.context, dtype=dtype)
        prefill = RunShape(phase="prefill", batch=params.batch, seq=params.seq, dtype=dtype)
        found: list[Step | None] = []
        problem: TraceShapeError | None = None
        for run in (decode, prefill):
            try:
                found.append(Step(traces(run)))
            except TraceShapeError as error:
                found.append(None)
                problem = error
        if problem is not None and found == [None, None]:
            raise problem
        return cls(*found)

    @property
    def any(self) -> Step:
        """One of the two, for what does not depend on the step."""
        step = self.decode or self.prefill
        assert step is not None, "one of them was found"
        return step

    @property
    def dtype(self) -> str:
        """The compute dtype."""
        return self.any.trace.run.dtype or "bf16"


@dataclass(frozen=True, slots=True)
class _Dtypes:
    """The steps by the dtype that a format leaves its unquantised parameters in.

    `native`: the config's own, which a checkpoint is in. `usual`: as asked, else 16 bits. `plain`: 16 bits, None where
    a stored record is in fp32.
    """

    native: _Steps
    usual: _Steps
    plain: _Steps | None

    @classmethod
    def of(cls, params: Params, traces: Traces) -> _Dtypes:
        """Run in as few dtypes as these three are."""
        native = _Steps.of(params, traces, None)
        asked = native if params.dtype is None else _Steps.of(params, traces, params.dtype)
        plain = next((steps for steps in (asked, native) if steps.dtype != "fp32"), None)
        if plain is None:
            try:
                plain = _Steps.of(params, traces, "bf16")
            except TraceShapeError:
                return cls(native, asked, None)
        return cls(native, plain if params.dtype is None else asked, plain)

    def of_format(self, name: str) -> _Steps | None:
        """The steps that a format changes."""
        return {"native": self.native, "bf16": self.plain}.get(name, self.usual)


def _formats(
    params: Params, steps: _Dtypes, matrices: tuple[Quantisable, ...], native: NativeFormat | None
) -> dict[str, Quantised | None]:
    """Every format asked for; None for a native one that is not known."""
    asked = params.only or (*load_formats(), "native")
    built_in = load_formats()
    found: dict[str, Quantised | None] = {}
    for name in asked:
        of_format = steps.of_format(name)
        if of_format is None or (name == "native" and native is not None and native.problem):
            found[name] = None
        elif name in built_in:
            found[name] = in_format(name, built_in[name], matrices, of_format.any.structure, params.keep)
        elif native is None:
            found[name] = Quantised("native", {}, of_format.any.weight_bytes)
        else:
            found[name] = natively(native, of_format.any.structure)
    return found


def _format_table(formats: dict[str, Quantised | None], plain: _Steps | None) -> Table:
    built_in = load_formats()
    rows: list[dict[str, Value]] = []
    for name, one in formats.items():
        about = built_in[name].about if name in built_in else "the checkpoint's own"
        rows.append(
            {
                "format": name,
                "bits_per_weight": None if one is None else one.bits_per_weight,
                "params": None if one is None else one.params,
                "packed_bytes": None if one is None else one.packed_bytes,
                "scale_bytes": None if one is None else one.scale_bytes,
                "kept_bytes": None if one is None else one.kept_bytes,
                "weight_bytes": None if one is None else one.weight_bytes,
                "ratio_to_bf16": None if one is None or plain is None else one.weight_bytes / plain.any.weight_bytes,
                "about": about,
            }
        )
    return Table(units=FORMAT_UNITS, rows=tuple(rows))


def _gpu_table(
    params: Params, formats: dict[str, Quantised | None], steps: _Dtypes, found: tuple[Machine, ...]
) -> Table:
    rows: list[dict[str, Value]] = [
        _gpu_row(params, name, one, steps, machine) for machine in found for name, one in formats.items()
    ]
    return Table(units=GPU_UNITS, rows=tuple(rows))


def _gpu_row(params: Params, name: str, one: Quantised | None, steps: _Dtypes, machine: Machine) -> dict[str, Value]:
    row: dict[str, Value] = dict.fromkeys(GPU_UNITS)
    row |= {"format": name, "gpu": machine.gpu.name}
    own = steps.of_format(name)
    if one is None or own is None:
        return row
    memory = _memory(params, own)
    room = max(0, int(machine.memory_bytes) - one.weight_bytes)
    alone = None if memory is None else memory.bytes_at(params.context)
    plain = steps.plain
    return row | {
        "fits": one.weight_bytes + params.batch * (alone or 0) <= machine.memory_bytes,
        "gpus_needed": -(-one.weight_bytes // int(machine.memory_bytes)),
        "kv_tokens": room * params.context // alone if alone else None,
        "compute": one.compute(machine) or own.dtype,
        **_times(params, "decode", one, own.decode, None if plain is None else plain.decode, machine),
        **_times(params, "prefill", one, own.prefill, None if plain is None else plain.prefill, machine),
    }


def _memory(params: Params, steps: _Steps) -> KvMemory | None:
    return None if steps.decode is None else KvMemory(parts=with_format(steps.decode.parts, params.kv_dtype))


def _times(
    params: Params, phase: str, one: Quantised, step: Step | None, plain: Step | None, machine: Machine
) -> dict[str, Value]:
    """The bound of a step in this format, and how often it fits into the step with 16-bit weights, the cache in the
    same type."""
    seconds = None if step is None else total_seconds(one.works(_works(params, step), machine), machine)
    before = None if plain is None else total_seconds(_works(params, plain), machine)
    return {f"{phase}_seconds": seconds, f"{phase}_gain": before / seconds if seconds and before else None}


def _works(params: Params, step: Step) -> tuple[Work, ...]:
    return tuple(_with_cache(work, step, params.kv_dtype) for work in step_work(step))


def _with_cache(work: Work, step: Step, kv_dtype: str | None) -> Work:
    """Attention that reads keys and values of another type (only what came from the cache, in decode)."""
    if kv_dtype is None or work.kind != "attention" or step.trace.run.phase != "decode":
        return work
    own = sum(part.read_bits for part in step.parts)
    other = sum(part.read_bits for part in with_format(step.parts, kv_dtype))
    return replace(work, cache_bytes=work.cache_bytes * other // own if own else work.cache_bytes)


def _keep_table(params: Params, step: Step, matrices: Iterable[Quantisable]) -> Table:
    """What keeping each kind of matrix high would add, in the first format asked for (else int4-g128)."""
    built_in = load_formats()
    name = next((asked for asked in params.only if asked in built_in and not built_in[asked].is_dense), YARDSTICK)
    folded: defaultdict[str, list[Quantisable]] = defaultdict(list)
    for one in matrices:
        folded[step.structure.layers.split(one.path)[0]].append(one)
    total = sum(p.count for p in step.trace.parameters if not p.buffer and p.tied_to is None)
    rows = tuple(
        _keep_row(params, name, built_in[name], pattern, same, step, total) for pattern, same in folded.items()
    )
    return Table(units=KEEP_UNITS, rows=rows)


def _keep_row(
    params: Params, name: str, format: Format, pattern: str, same: list[Quantisable], step: Step, total: int
) -> dict[str, Value]:
    stored = sum(tensor.bytes for one in same for tensor in format.tensors(one.matrix))
    dense = sum(one.placed.parameter.bytes for one in same)
    count = sum(one.matrix.elements for one in same)
    return {
        "format": name,
        "module": pattern.removesuffix(".weight"),
        "layers": layer_ranges(step.structure.layers.split(one.path)[1] for one in same),
        "params": count,
        "share": count / total,
        "bytes": stored,
        "extra_bytes_if_kept": dense - stored,
        "kept": any(kept(one, params.keep) for one in same),
    }


def _assumptions(params: Params, step: Step) -> Iterable[str]:
    yield from step.trace.assumptions
    if params.kv_dtype is not None:
        yield f"cached keys and values in {params.kv_dtype}: {KV_FORMATS[params.kv_dtype].scales}"
    if (
        params.dtype is None
        and step.trace.run.dtype == "bf16"
        and "float32" in str(step.trace.model.config.get("dtype"))
    ):
        yield "the config's dtype is fp32; what is not quantised is taken as bf16"


def _notes(params: Params, native: NativeFormat | None) -> Iterable[str]:
    yield "weight-only formats compute in the model's dtype: they gain nothing where arithmetic is the bound (prefill)"
    yield "fits: weights and the cache of --batch sequences at --context; gpus_needed: weights alone"
    yield "times are of one GPU, as if its memory held the model where gpus_needed is more (cost spreads them)"
    if params.only and "native" not in params.only:
        return
    if native is None:
        yield "native: the config names no quantisation, so the checkpoint is in the model's own dtype"
    elif native.problem:
        yield f"native: {native.method} is not known: {native.problem}"
    else:
        cache = f", its cache in {native.kv_dtype}" if native.kv_dtype else ""
        yield f"native: {native.method}{cache}, by {native.route}"
        yield from native.notes
