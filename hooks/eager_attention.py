"""Attention written out as two batched products around a softmax: found in the graph and named like the fused op.

Models outside transformers' attention interface (BLOOM, MPT, the BERT family, plain modules) multiply q by k, scale
and mask the scores, take a softmax and multiply by v. Walking from each softmax backwards and forwards through ops
that keep the scores' shape finds the two products. q and k are the first product's operands, whichever way they were
transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from introspect.hooks.masks import MaskFacts
from introspect.records import AttentionCall, Gemm, Op, Tensor

_SHAPE_KEEPING = ("elementwise", "activation", "cast", "copy", "layout", "softmax", "random", "factory", "scatter")
_SOFTMAX = ("aten._softmax.default", "aten._safe_softmax.default", "aten._masked_softmax.default")
_MAX_STEPS = 96  # ops looked at between a product and its softmax; relative biases of T5's kind take about 20
Links = list[list[int]]


def mark_eager_attention(
    ops: list[Op], tensors: tuple[Tensor, ...], masks: Mapping[int, MaskFacts], batch: int
) -> tuple[str, ...]:
    """Rewrite, in `ops`, the products around each softmax as attention_qk and attention_pv, with the call's facts.

    Args:
        ops: the run's ops in order; changed in place.
        masks: what each mask lets through, by its storage.
        batch: sequences, which tells heads from sequences in the products' batch.

    Returns:
        An assumption for modules whose mask could not be read: their pairs are counted as dense.
    """
    if not any(op.name in _SOFTMAX for op in ops):
        return ()
    makers, readers = links(ops, tensors)
    unknown: dict[str, None] = {}
    for position, op in enumerate(ops):
        if op.name not in _SOFTMAX:
            continue
        scores, between = _nearest_product(position, ops, makers)
        context, _ = _nearest_product(position, ops, readers)
        if scores is None or context is None or scores == context:
            continue
        path = [ops[p] for p in dict.fromkeys((position, *between))]
        facts = _mask_facts(path, tensors, masks)
        masked = facts is None and _is_masked(path, tensors, ops[scores])
        if _mark(ops, tensors, scores, context, facts, batch) and masked:
            unknown[op.module] = None
    if not unknown:
        return ()
    return (
        f"attention mask of {next(iter(unknown))} ({len(unknown)} modules) not readable: every pair counted visible",
    )


def _is_masked(path: list[Op], tensors: tuple[Tensor, ...], scores: Op) -> bool:
    """Whether something beside the scores themselves enters between the product and the softmax."""
    own = {tensors[i].storage for op in (*path, scores) if op.kind != "layout" for i in op.outputs}
    return any(
        tensors[i].storage not in own and tensors[i].elements > 1 and tensors[i].role != "weight"
        for op in path
        for i in op.inputs
    )


def links(ops: list[Op], tensors: tuple[Tensor, ...]) -> tuple[Links, Links]:
    """For each op, the ops that made its inputs and the ops that read its outputs (by storage, last writer wins)."""
    producer: dict[int, int] = {}
    makers: Links = []
    readers: Links = [[] for _ in ops]
    for position, op in enumerate(ops):
        sources = {producer[tensors[i].storage] for i in op.inputs if tensors[i].storage in producer}
        makers.append(sorted(sources))
        for source in sources:
            readers[source].append(position)
        for i in op.outputs:
            producer[tensors[i].storage] = position
    return makers, readers


def _nearest_product(start: int, ops: list[Op], links: Links) -> tuple[int | None, list[int]]:
    """The nearest product of two activations reached through shape-keeping ops, and the ops on the way."""
    queue, seen = [start], {start}
    for position in queue:
        for other in links[position]:
            if other in seen or len(seen) > _MAX_STEPS:
                continue
            seen.add(other)
            gemms = ops[other].gemms
            if gemms and gemms[0].kind == "einsum":
                return other, queue
            if not gemms and ops[other].kind in _SHAPE_KEEPING:
                queue.append(other)
    return None, queue


def _mask_facts(ops: list[Op], tensors: tuple[Tensor, ...], masks: Mapping[int, MaskFacts]) -> MaskFacts | None:
    for op in ops:
        for i in op.inputs:
            if (facts := masks.get(tensors[i].storage)) is not None:
                return facts
    return None


def _mark(
    ops: list[Op], tensors: tuple[Tensor, ...], scores: int, context: int, facts: MaskFacts | None, batch: int
) -> bool:
    qk, pv = ops[scores].gemms[0], ops[context].gemms[0]
    if qk.n != pv.k and qk.m == pv.k:  # taken as K Q^T
        qk = replace(qk, m=qk.n, n=qk.m, lhs=qk.rhs, rhs=qk.lhs)
    if pv.k != qk.n and pv.m == qk.n:
        pv = replace(pv, m=pv.n, n=pv.m, lhs=pv.rhs, rhs=pv.lhs)
    if qk.n != pv.k or None in (qk.lhs, qk.rhs, pv.rhs, pv.out):
        return False
    call = _call(qk, pv, tensors, facts, batch)
    ops[scores] = replace(ops[scores], gemms=(replace(qk, kind="attention_qk"),), attention=call)
    ops[context] = replace(ops[context], gemms=(replace(pv, kind="attention_pv"),))
    return True


def _call(qk: Gemm, pv: Gemm, tensors: tuple[Tensor, ...], facts: MaskFacts | None, batch: int) -> AttentionCall:
    assert qk.lhs is not None
    assert qk.rhs is not None
    assert pv.rhs is not None
    assert pv.out is not None
    heads = max(1, qk.batch // batch)
    dense = batch * qk.m * qk.n
    keys = tensors[qk.rhs]
    # An expanded view stores fewer elements than it shows: that many query heads share each stored key head.
    stored = keys.storage_bytes * 8 // keys.bits
    shared = max(1, keys.elements // max(1, stored)) if keys.role != "weight" else 1
    pairs = dense if facts is None else min(facts.pairs, dense)
    return AttentionCall(
        q=qk.lhs,
        k=qk.rhs,
        v=pv.rhs,
        out=pv.out,
        query_heads=heads,
        kv_heads=max(1, heads // shared),
        visible_pairs=pairs,
        causal=facts is not None and pairs < dense,
        window=facts.widest if facts is not None and facts.widest < qk.n else None,
    )
