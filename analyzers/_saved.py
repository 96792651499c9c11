"""What autograd keeps of a recorded training step, and what other kernels would keep of the same step.

Recorded attention is one fused call: q, k, v, the result and the log-sum-exp are kept. Materialised scores keep, as
transformers' eager attention does, the fp32 softmax of every (query, key) pair, a copy of it in a lower compute dtype,
and keys and values expanded to the query heads. The Megatron formula is of Korthikanti et al. 2022 (eq. 2),
s*b*h*(34 + 5*a*s/h) bytes a layer: 16 bit, GELU MLP of width 4h, dropout, equal heads, scores stored.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from introspect.analyzers._structure import Structure
from introspect.records import Op, Trace
from introspect.units import DTYPE_BITS

LOSS = "aten.nll_loss_forward.default"
FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One storage kept for the backward pass: the op that wrote it (None: an input), and what it holds."""

    module: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    is_scores: bool


def saved_storages(trace: Trace) -> tuple[Saved, ...]:
    """Every storage of `trace.saved`, by the forward op that first wrote it."""
    wanted, found = set(trace.saved), {}
    scores = _score_shapes(trace)
    for op, _ in trace.walk():
        for t in (*op.outputs, *op.inputs):
            tensor = trace.tensors[t]
            if tensor.storage in wanted and tensor.storage not in found and not op.backward:
                written = t in op.outputs
                found[tensor.storage] = Saved(
                    module=op.module if written else "",
                    op=op.name if written else "input",
                    shape=tensor.shape,
                    dtype=tensor.dtype,
                    bytes=tensor.storage_bytes,
                    is_scores=tensor.elements in scores.get(op.module, ()),
                )
    return tuple(found.values())


def _score_shapes(trace: Trace) -> dict[str, set[int]]:
    """Elements of the score matrices of attention that is written out as products, by module."""
    found: dict[str, set[int]] = {}
    for op, _ in trace.walk():
        for gemm in op.gemms:
            if gemm.kind == "attention_qk" and gemm.out is not None and not op.backward:
                found.setdefault(op.module, set()).add(gemm.batch * gemm.m * gemm.n)
    return found


def fused_bytes(trace: Trace) -> int | None:
    """Bytes saved when every attention is a fused kernel; None where the storages are not known one by one."""
    if trace.saved_bytes is None or not trace.saved:
        return trace.saved_bytes if not _score_shapes(trace) else None
    scores = sum(one.bytes for one in saved_storages(trace) if one.is_scores)
    sums = sum(
        FP32 * gemm.batch * gemm.m * times
        for op, times in trace.walk()
        for gemm in op.gemms
        if gemm.kind == "attention_qk" and gemm.out is not None and not op.backward
    )
    return trace.saved_bytes - scores + sums


def materialised_bytes(trace: Trace) -> int | None:
    """Bytes saved when every fused attention call stores its scores instead."""
    if trace.saved_bytes is None:
        return None
    return trace.saved_bytes + sum(_materialised_extra(trace, op) * times for op, times in _fused_calls(trace))


def _fused_calls(trace: Trace) -> list[tuple[Op, int]]:
    return [(op, n) for op, n in trace.walk() if op.attention and not op.backward and op.gemms[0].out is None]


def _materialised_extra(trace: Trace, op: Op) -> int:
    call, scores = op.attention, op.gemms[0]
    assert call is not None
    k, v = trace.tensors[call.k], trace.tensors[call.v]
    width = DTYPE_BITS[k.dtype] // 8
    copies = 0 if k.dtype == "fp32" else width
    expanded = (k.bytes + v.bytes) * (call.query_heads - call.kv_heads) // call.kv_heads
    return scores.batch * scores.m * (scores.n * (FP32 + copies) - FP32) + expanded


def megatron_bytes(structure: Structure) -> int | None:
    """The formula summed over the recorded attention calls; None for a model without attention or residual stream."""
    graph = structure.graph
    widths = Counter(graph.tensors[graph.ops[i].outputs[0]].shape[-1] for i in structure.residual_adds)
    scores = [
        (gemm, graph.ops[i].attention, graph.times[i])
        for i, op in enumerate(graph.ops)
        for gemm in op.gemms
        if gemm.kind == "attention_qk"
    ]
    if not widths or not scores:
        return None
    hidden, total = widths.most_common(1)[0][0], 0
    for gemm, call, times in scores:
        heads = call.query_heads if call is not None else 1
        rows = gemm.batch * gemm.m // heads  # s*b
        total += times * (34 * rows * hidden + 5 * heads * rows * gemm.n)
    return total


def logits_bytes(trace: Trace) -> int | None:
    """Bytes of the log-probabilities that the loss reads; None when the model computes no such loss."""
    read = [trace.tensors[op.inputs[0]].bytes for op, _ in trace.walk() if op.name == LOSS]
    return sum(read) or None
