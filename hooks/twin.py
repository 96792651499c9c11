"""Meta = real: run a small twin of a model with random weights on the CPU and compare with its run on meta.

Compared are the calls that cost something: products, attention, experts, convolutions, scans, and the cache before and
after. Mask building, tensor factories and moves are not: a real mask takes ops that a mask without values does not.
The same real inputs then go through the library's own attention and experts: equal logits show that our ops compute
what the library computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from introspect.errors import ModelRunError
from introspect.hooks.config_fields import differing
from introspect.hooks.observe import observe
from introspect.hooks.replay import Heard, listening, replayed
from introspect.hooks.shrink import IDENTITY, TOKENS, build_on_meta, build_with_weights, shrink
from introspect.records import AttentionCall, ExpertCall, Repeat, RunShape, Trace
from introspect.twin_record import TwinAgreement, TwinReport

Call = tuple[str, tuple[object, ...]]  # kind and sizes
Shapes = tuple[tuple[int, ...], ...]  # of q, k and v

BATCH = 2  # sequences: one alone would hide what depends on their number
RUNS = (
    RunShape(phase="prefill", batch=BATCH, seq=TOKENS),
    RunShape(phase="decode", batch=BATCH, seq=1, context=TOKENS),
)
LONG = RunShape(phase="prefill", batch=BATCH, seq=512)  # a scan over so many tokens is folded on meta, never on the CPU


def run_twin(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> TwinReport:
    """Shrink, run both ways and compare. Raises ShrinkError when no twin can be made."""
    small = shrink(model_class, config)
    real = build_with_weights(model_class, small)
    agreements: list[TwinAgreement] = []
    differences: list[str] = []
    for run, meta_trace in _on_meta(model_class, small):
        with listening(real) as heard:
            real_trace = observe(real, IDENTITY, run)
        assumed = {_shapes(meta_trace, call) for call in _attention(meta_trace) if call.assumed_pairs}
        on_meta, on_cpu = _calls(meta_trace, assumed), _calls(real_trace, assumed)
        agreements.extend(_agreements(run, on_meta, on_cpu))
        differences.extend(_differences(run, on_meta, on_cpu))
    return TwinReport(
        class_name=model_class.__name__,
        parameters=sum(p.numel() for p in real.parameters()),
        changed=tuple(differing(config, small)),
        agreements=tuple(agreements),
        differences=tuple(differences),
        output_error=_output_error(real, heard),
    )


def _on_meta(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> Iterator[tuple[RunShape, Trace]]:
    """The steps to compare with their meta traces: the long one only where it has a folded scan."""
    model = build_on_meta(model_class, config)
    folded = None
    with suppress(ModelRunError):  # a table of learned positions is shorter; no model that scans has one
        folded = observe(model, IDENTITY, LONG)
    if folded is not None and any(isinstance(op, Repeat) for op in folded.ops):
        yield LONG, folded
    for run in RUNS:
        yield run, observe(model, IDENTITY, run)


def _calls(trace: Trace, assumed: set[Shapes]) -> Counter[Call]:
    """Every call and how often. Attention calls in `assumed`, whose pairs depend on weights, count by their shapes."""
    counted: Counter[Call] = Counter()
    for op, times in trace.walk():
        for gemm in op.gemms:
            many = (_routed_rows(op.experts) if op.experts else gemm.rows,) if gemm.rows else (gemm.batch, gemm.m)
            counted[gemm.kind, (*many, gemm.k, gemm.n)] += times
        if (call := op.attention) is not None:
            shapes = _shapes(trace, call)
            visible = () if shapes in assumed else (call.visible_pairs, call.window)
            counted["attention", (*shapes, call.query_heads, call.kv_heads, *visible)] += times
        if (experts := op.experts) is not None:
            counted["experts", (experts.experts, experts.top_k, experts.tokens, _routed_rows(experts))] += times
    for held in trace.cache:
        counted["cache", (held.layer, held.layer_class, held.name, held.shape_before, held.shape_after)] += 1
    return counted


def _attention(trace: Trace) -> Iterator[AttentionCall]:
    return (op.attention for op, _ in trace.walk() if op.attention is not None)


def _shapes(trace: Trace, call: AttentionCall) -> Shapes:
    return tuple(trace.tensors[i].shape for i in (call.q, call.k, call.v))


def _routed_rows(experts: ExpertCall) -> int:
    """Rows of a grouped product that do not depend on the router's choice: it decides which expert multiplies a pair,
    and how many pairs go to experts that multiply nothing (identity experts)."""
    return max(sum(experts.rows), experts.tokens * experts.top_k)


def _agreements(run: RunShape, on_meta: Counter[Call], on_cpu: Counter[Call]) -> Iterator[TwinAgreement]:
    both, meta_only, cpu_only = (_by_kind(c) for c in (on_meta & on_cpu, on_meta - on_cpu, on_cpu - on_meta))
    for kind in sorted({*both, *meta_only, *cpu_only}):
        yield TwinAgreement(
            phase=run.phase,
            tokens=run.seq,
            kind=kind,
            both=both[kind],
            meta_only=meta_only[kind],
            cpu_only=cpu_only[kind],
        )


def _by_kind(calls: Counter[Call]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for (kind, _), times in calls.items():
        counted[kind] += times
    return counted


def _differences(run: RunShape, on_meta: Counter[Call], on_cpu: Counter[Call]) -> Iterator[str]:
    for where, calls in (("meta", on_meta - on_cpu), ("CPU", on_cpu - on_meta)):
        for (kind, sizes), times in sorted(calls.items(), key=str):
            yield f"{run.phase} of {run.seq}: only on {where}: {times} x {kind} {', '.join(map(str, sizes))}"


def _output_error(model: nn.Module, heard: list[Heard]) -> float | None:
    """Largest difference from the logits that the library's own attention and experts give, relative to the largest."""
    pairs = zip(heard, replayed(model, heard), strict=True)
    errors = [_relative_error(call.logits, library) for call, library in pairs]
    return None if None in errors or not errors else max(error for error in errors if error is not None)


def _relative_error(ours: torch.Tensor, library: torch.Tensor) -> float | None:
    finite = library.isfinite()
    if not finite.any():
        return None
    if not torch.equal(finite, ours.isfinite()):
        return torch.inf
    largest = float(library[finite].abs().max())
    return float((ours - library)[finite].abs().max()) / max(largest, torch.finfo(library.dtype).tiny)
