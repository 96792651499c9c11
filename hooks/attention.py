"""Attention as one op: what the model hands to its attention kernel, before any head is expanded.

Shapes: q [B, H, S, D], k [B, G, T, D], v [B, G, T, Dv] -> [B, S, H, Dv] and the log-sum-exp [B, H, S] in fp32 that a
flash kernel keeps for its backward. The op is registered once and called from functions that `attention_interface`
puts into transformers' attention and mask interfaces for the time of a run. It has a meta kernel, and a CPU kernel
with the real mathematics so that twins can run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import (
    AttentionMaskInterface,
    and_masks,
    causal_mask_function,
    padding_mask_function,
    prepare_padding_mask,
)
from transformers.modeling_utils import AttentionInterface

from introspect.hooks.masks import MaskFacts, count_pairs
from introspect.hooks.recorder import Recorder
from introspect.hooks.shadow import Shadow

NAME = "introspect"  # key of both interfaces
_META = torch.device("meta")
UNKNOWN = -1  # pairs of a mask whose value depends on weights
Geometry = tuple[Any, int, int, int, int]  # mask function, q and kv length, q and kv offset

_library = torch.library.Library("introspect", "FRAGMENT")
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, Tensor? sinks, float scale, float softcap, "
    "int pairs, int widest, bool causal) -> (Tensor, Tensor)"
)
_library.define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? mask, Tensor? bias, "
    "Tensor? sinks, float scale, float softcap, bool causal) -> (Tensor, Tensor, Tensor, Tensor?, Tensor?)"
)


def _shape_only(q: Any, k: Any, v: Any, mask: Any, bias: Any, sinks: Any, scale: Any, softcap: Any, *_: Any) -> Any:
    batch, heads, length, _width = q.shape
    return q.new_empty((batch, length, heads, v.shape[-1])), q.new_empty((batch, heads, length), dtype=torch.float32)


def _scores(q: Any, k: Any, mask: Any, bias: Any, scale: float, softcap: float, causal: bool) -> tuple[Any, Any]:
    """Masked scores [B, H, S, T] in fp32 and the derivative of the soft cap (1 without one)."""
    scores = (q.float() * scale) @ k.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(-1, -2)
    slope = torch.ones((), dtype=torch.float32)
    if softcap:
        squashed = torch.tanh(scores / softcap)
        slope, scores = 1 - squashed.square(), squashed * softcap
    if bias is not None:
        scores = scores + bias.float()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask.float()
    elif causal:
        rows, columns = scores.shape[-2:]
        visible = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores, slope


def _compute(q: Any, k: Any, v: Any, mask: Any, bias: Any, sinks: Any, scale: Any, softcap: Any, *rest: Any) -> Any:
    scores, _ = _scores(q, k, mask, bias, scale, softcap, rest[-1])
    lse = torch.logsumexp(scores, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float().view(1, -1, 1).expand_as(lse))
    weights = torch.exp(scores - lse[..., None]).nan_to_num(0.0)
    out = weights @ v.float().repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return out.to(q.dtype).transpose(1, 2).contiguous(), lse


def _backward_shape(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, mask: Any, bias: Any, sinks: Any, *_: Any
) -> Any:
    grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
    return (*grads, *(None if t is None else torch.empty_like(t) for t in (bias, sinks)))


def _backward_compute(
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    mask: Any,
    bias: Any,
    sinks: Any,
    scale: Any,
    softcap: Any,
    causal: Any,
) -> Any:
    # A kernel runs below autograd, so the derivative is written out: P = softmax(S), dS = P * (dP - sum(dP * P)).
    group_k, group_v = q.shape[1] // k.shape[1], q.shape[1] // v.shape[1]
    scores, slope = _scores(q, k, mask, bias, scale, softcap, causal)
    weights = torch.exp(scores - lse[..., None]).nan_to_num(0.0)
    d_out = grad.float().transpose(1, 2)
    d_v = weights.transpose(-1, -2) @ d_out
    d_weights = d_out @ v.float().repeat_interleave(group_v, dim=1).transpose(-1, -2)
    delta = (d_weights * weights).sum(-1, keepdim=True)
    d_scores = weights * (d_weights - delta)
    d_raw = d_scores * slope * scale
    d_q = d_raw @ k.float().repeat_interleave(group_k, dim=1)
    d_k = d_raw.transpose(-1, -2) @ q.float()
    d_sinks = None
    if sinks is not None:
        share = torch.exp(sinks.float().view(1, -1, 1) - lse)
        d_sinks = -(share * delta[..., 0]).sum((0, 2)).view_as(sinks).to(sinks.dtype)
    d_bias = None if bias is None else d_scores.sum_to_size(bias.shape).to(bias.dtype)
    return (
        d_q.to(q.dtype),
        _fold_heads(d_k, group_k).to(k.dtype),
        _fold_heads(d_v, group_v).to(v.dtype),
        d_bias,
        d_sinks,
    )


def _fold_heads(grad: torch.Tensor, group: int) -> torch.Tensor:
    batch, heads, length, width = grad.shape
    return grad.view(batch, heads // group, group, length, width).sum(2)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, mask, bias, sinks, scale, softcap, _pairs, _widest, causal = inputs
    ctx.save_for_backward(q, k, v, sinks, bias, *output)
    ctx.mask = mask  # not through save_for_backward: a flash kernel keeps no mask
    ctx.settings = (scale, softcap, causal)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Any, _grad_lse: Any) -> Any:
    q, k, v, sinks, bias, out, lse = ctx.saved_tensors
    d_q, d_k, d_v, d_bias, d_sinks = torch.ops.introspect.attention_backward(
        grad, q, k, v, out, lse, ctx.mask, bias, sinks, *ctx.settings
    )
    return d_q, d_k, d_v, None, d_bias, d_sinks, None, None, None, None, None


_library.impl("attention", _shape_only, "Meta")
_library.impl("attention", _compute, "CPU")
_library.impl("attention_backward", _backward_shape, "Meta")
_library.impl("attention_backward", _backward_compute, "CPU")
torch.library.register_autograd("introspect::attention", _backward, setup_context=_setup, lib=_library)


class AttentionObserver:
    """Answers transformers' attention and mask interfaces; remembers what each mask lets through."""

    def __init__(self, recorder: Recorder, shadow: Shadow) -> None:
        self._recorder = recorder
        self._shadow = shadow
        self.facts: dict[int, MaskFacts] = {}  # by storage of the mask, as the recorder numbers it
        self.geometry: dict[int, Geometry] = {}

    def mask(
        self, batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0, **options: Any
    ) -> torch.Tensor:
        """Stand in for a mask function: one mask of batch 1, expanded (a batch of equal masks is stored once)."""
        function, sequences = options.get("mask_function", causal_mask_function), 1
        if (padding := options.get("attention_mask")) is not None:
            padded: Any = prepare_padding_mask(padding, kv_length, kv_offset)
            function, sequences = and_masks(function, padding_mask_function(padded)), batch_size
        device = torch.device(options.get("device", "cpu"))
        geometry = (function, q_length, kv_length, int(q_offset), kv_offset)
        counted = [self.count(function, b, *geometry[1:], device=device) for b in range(sequences)]
        facts = MaskFacts(
            pairs=sum(f.pairs for f in counted) * batch_size // sequences,
            widest=max(f.widest for f in counted),
            rows=counted[0].rows,
            keys=kv_length,
        )
        if device.type == "meta":
            mask = torch.empty((1, 1, q_length, kv_length), dtype=torch.bool, device="meta")
            mask = self._shadow.give_later(mask, lambda: _real_mask(*geometry))
        else:
            mask = _real_mask(*geometry, sequences=sequences)
        self._remember(mask, facts, geometry)
        return mask.expand(batch_size, 1, q_length, kv_length)

    def additive_mask(
        self, batch_size: int, q_length: int, kv_length: int, *offsets: Any, **options: Any
    ) -> torch.Tensor:
        """The same mask as the numbers that eager attention adds to its scores."""
        visible = self.mask(batch_size, q_length, kv_length, *offsets, **options)
        dtype = options.get("dtype", torch.float32)
        zero = torch.zeros((), device=visible.device, dtype=dtype)
        added = torch.where(visible, zero, torch.finfo(dtype).min)
        key = self._recorder.storage(visible)
        self._remember(added, self.facts[key], self.geometry[key])
        return added

    def _remember(self, mask: torch.Tensor, facts: MaskFacts, geometry: Geometry) -> None:
        key = self._recorder.storage(mask)
        self.facts[key], self.geometry[key] = facts, geometry

    def count(
        self,
        function: Any,
        sequence: int,
        q_length: int,
        kv_length: int,
        q_offset: int,
        kv_offset: int,
        device: torch.device = _META,
    ) -> MaskFacts:
        """What a mask function lets through for one sequence of the batch. `device`: that of the model's tensors."""

        # Closures may hold tensors of the model (Llama 4's left padding), so on meta the indices are meta tensors too.
        def evaluate(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            indices = [torch.tensor(sequence), torch.tensor(0), q + q_offset, kv + kv_offset]
            if device.type == "meta":
                indices = [self._shadow.give(torch.empty_like(i, device=device), i) for i in indices]
            visible = function(*indices)
            value = self._shadow.value(visible)
            if value is None:
                raise NotImplementedError("the attention mask depends on weights; visible pairs cannot be counted")
            return value

        paused, self._recorder.paused = self._recorder.paused, True
        try:
            return count_pairs(evaluate, q_length, kv_length)
        finally:
            self._recorder.paused = paused

    def attention(
        self, module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """Stand in for an attention function. Returns ([B, S, H, Dv], None) as the interface asks."""
        is_causal = options.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        selected = options.get("indices")
        return (
            self.call(
                query,
                key,
                value,
                attention_mask,
                selected=selected,
                bias=options.get("position_bias"),
                sinks=options.get("s_aux"),
                scale=options.get("scaling"),
                softcap=options.get("softcap"),
                causal=causal and attention_mask is None and query.shape[2] > 1,
            ),
            None,
        )

    def call(
        self,
        q: Any,
        k: Any,
        v: Any,
        mask: Any,
        *,
        bias: Any,
        sinks: Any,
        scale: Any,
        softcap: Any,
        causal: bool,
        selected: Any = None,
    ) -> torch.Tensor:
        """Call the op with the pairs that its mask lets through; [B, S, H, Dv].

        `selected` [B, S, K]: the keys that sparse attention picked for each query, inside the mask.
        """
        facts = self._visible(mask, q.shape[0], q.shape[2], k.shape[2], causal)
        if selected is not None:
            facts = _within_selection(facts, q.shape[0], selected.shape[-1])
            mask = _masked_to(mask, selected, k.shape[2])
        out: torch.Tensor = torch.ops.introspect.attention(
            q,
            k,
            v,
            mask,
            bias,
            sinks,
            float(scale) if scale is not None else q.shape[-1] ** -0.5,
            float(softcap or 0.0),
            facts.pairs,
            facts.widest,
            causal,
        )[0]
        return out

    def _visible(self, mask: Any, batch: int, q_length: int, kv_length: int, causal: bool) -> MaskFacts:
        if mask is not None:
            facts = self.facts.get(self._recorder.storage(mask))
            if facts is not None and mask.shape[-1] == kv_length:
                return facts
            return self._from_value(mask, batch, q_length, kv_length)
        hidden = min(q_length, kv_length) if causal else 1  # causal: the last query sees all keys
        return MaskFacts(pairs=batch * (q_length * kv_length - hidden * (hidden - 1) // 2), widest=kv_length)

    def _from_value(self, mask: torch.Tensor, batch: int, q_length: int, kv_length: int) -> MaskFacts:
        """A mask the model made itself: counted from its value, or left open for derived_masks.py."""
        value = self._shadow.value(mask)
        if value is None or value.shape[-1] != kv_length:
            return MaskFacts(pairs=UNKNOWN, widest=kv_length)
        visible = value if value.dtype is torch.bool else value > torch.finfo(value.dtype).min / 2
        rows = visible.expand(batch, visible.shape[1], q_length, kv_length)[:, 0].sum(-1)
        return MaskFacts(pairs=int(rows.sum()), widest=int(rows.max()))


def _within_selection(facts: MaskFacts, batch: int, selected: int) -> MaskFacts:
    """Every query sees its selected keys, or all that the mask leaves it when those are fewer."""
    if facts.rows is None:
        return facts
    pairs = batch * int(facts.rows.clamp(max=selected).sum())
    return MaskFacts(pairs=pairs, widest=facts.widest, rows=facts.rows.clamp(max=selected), keys=facts.keys)


def _masked_to(mask: Any, selected: torch.Tensor, keys: int) -> Any:
    """The mask inside the selection; on meta its value does not matter and it stays as it is."""
    if selected.device.type == "meta":
        return mask
    chosen = torch.zeros((*selected.shape[:2], keys), dtype=torch.bool).scatter(-1, selected.long(), True)[:, None]
    if mask is None or mask.dtype is torch.bool:
        return chosen if mask is None else mask & chosen
    return torch.where(chosen, mask, torch.finfo(mask.dtype).min)


def _real_mask(
    function: Any, q_length: int, kv_length: int, q_offset: int, kv_offset: int, sequences: int = 1
) -> torch.Tensor:
    q, kv = torch.arange(q_length) + q_offset, torch.arange(kv_length) + kv_offset
    sequence = torch.arange(sequences)[:, None, None, None]
    visible: torch.Tensor = function(sequence, torch.tensor(0), q[:, None], kv[None, :])
    return visible.expand(sequences, 1, q_length, kv_length).contiguous()


@contextmanager
def attention_interface(observer: AttentionObserver, *, additive: bool) -> Iterator[None]:
    """Register the observer with transformers, class-wide (masks test the class mapping), and undo it on exit.

    "sdpa" is answered too: a model that does not declare the interface may still look its function up there, and the
    function it would find packs the queries of a group into rows, where head counts are lost. So are the mask functions
    of "sdpa" and "eager": models outside the interface build their masks through them, and a mask's pairs are known
    only where it is made. `additive`: the model takes masks as numbers that are added to the scores; one that cannot
    run torch's fused attention may compute with them (DeepSeek-V4 does).
    """
    masks, functions = AttentionMaskInterface._global_mapping, AttentionInterface._global_mapping
    usual, usual_functions = dict(masks), dict(functions)
    functions.update({NAME: observer.attention, "sdpa": observer.attention})
    own = observer.additive_mask if additive else observer.mask
    masks.update({NAME: own, "sdpa": observer.mask, "eager": observer.additive_mask})
    try:
        yield
    finally:
        for mapping, before in ((functions, usual_functions), (masks, usual)):
            mapping.clear()
            mapping.update(before)
