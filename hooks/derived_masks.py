"""Pairs that a mask lets through when the model made it from another mask and a selection.

Sparse attention keeps, for each query, the top-k keys of an indexer inside the causal mask; which keys depends on
weights, how many does not: min(k, keys visible anyway). Compressed entries may stand behind the window's own keys. Both
are read from the graph: walking back from the mask operand to masks whose rows are known and to the top-k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from introspect.hooks.attention import UNKNOWN
from introspect.hooks.eager_attention import Links, links
from introspect.hooks.masks import MaskFacts
from introspect.records import AttentionCall, Op, Tensor

_MASK_OPERAND = 3  # place of the mask among the tensor operands of the attention op, behind q, k and v
_MASK_MAKING = ("elementwise", "layout", "cast", "copy", "scatter", "gather", "factory", "cache_write")
_MAX_STEPS = 256


def resolve_masks(ops: list[Op], tensors: tuple[Tensor, ...], masks: Mapping[int, MaskFacts]) -> tuple[str, ...]:
    """Fill in, in `ops`, the pairs of attention calls whose mask was unknown; return what had to be assumed."""
    open_calls = [p for p, op in enumerate(ops) if op.attention is not None and op.attention.visible_pairs == UNKNOWN]
    if not open_calls:
        return ()
    makers, _ = links(ops, tensors)
    assumed: dict[str, str] = {}
    for position in open_calls:
        op = ops[position]
        assert op.attention is not None
        call, note = _resolve(op.attention, tensors, *_origins(position, ops, tensors, makers, masks))
        ops[position] = replace(op, attention=call)
        if note:
            assumed.setdefault(note, op.module)
    return tuple(f"{note} (from {module} on)" for note, module in assumed.items())


def _origins(
    position: int, ops: list[Op], tensors: tuple[Tensor, ...], makers: Links, masks: Mapping[int, MaskFacts]
) -> tuple[list[MaskFacts], list[tuple[int, int]]]:
    """The known masks that the mask operand was made from; of each top-k that selected in it, k and among how many."""
    mask_storage = tensors[ops[position].inputs[_MASK_OPERAND]].storage
    queue = [m for m in makers[position] if any(tensors[i].storage == mask_storage for i in ops[m].outputs)]
    seen, bases, selections = set(queue), [], []
    for maker in queue:
        op = ops[maker]
        if op.kind == "topk":
            selections.append((tensors[op.outputs[0]].shape[-1], tensors[op.inputs[0]].shape[-1]))
            continue
        bases += [masks[tensors[i].storage] for i in op.inputs if tensors[i].storage in masks]
        if op.kind in _MASK_MAKING and len(seen) < _MAX_STEPS:
            new = [m for m in makers[maker] if m not in seen]
            seen.update(new)
            queue.extend(new)
    return bases, selections


def _resolve(
    call: AttentionCall, tensors: tuple[Tensor, ...], bases: list[MaskFacts], selections: list[tuple[int, int]]
) -> tuple[AttentionCall, str]:
    q, keys = tensors[call.q], tensors[call.k].shape[2]
    batch, queries = q.shape[0], q.shape[2]
    base = next((b for b in bases if b.rows is not None and len(b.rows) == queries), None)
    if base is None or base.rows is None:
        note = "an attention mask depends on weights: every pair counted visible"
        return replace(call, visible_pairs=batch * queries * keys, assumed_pairs=True), note
    behind = keys - (base.keys or keys)  # entries that stand behind those the known mask is about
    if behind > 0:
        extra = min(behind, *(k for k, _ in selections))
        note = "every query sees as many compressed entries as are selected, also where fewer exist yet"
        pairs = batch * (int(base.rows.sum()) + queries * extra)
        return replace(call, visible_pairs=pairs, assumed_pairs=True), note
    among_keys = [k for k, among in selections if among == keys]
    rows = base.rows.clamp(max=min(among_keys)) if among_keys else base.rows
    call = replace(call, visible_pairs=batch * int(rows.sum()), causal=True)
    if selections and not among_keys:  # blocks of keys are selected: whose, and how many keys they show, is not known
        return replace(call, assumed_pairs=True), "blocks of keys selected by weights: counted as if all were"
    return call, ""
