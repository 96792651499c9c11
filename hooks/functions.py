"""Python-level calls that a dispatch mode cannot see: direct fused attention, and values leaving through lists."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from introspect.hooks.attention import AttentionObserver
from introspect.hooks.shadow import Shadow

_GET_ITEM = torch.Tensor.__getitem__


class FunctionObserver(TorchFunctionMode):
    """Turn `F.scaled_dot_product_attention` into the attention op, answer `tolist` and `numpy` on meta, and keep the
    values of lists that index."""

    def __init__(self, attention: AttentionObserver, shadow: Shadow) -> None:
        super().__init__()
        self._attention = attention
        self._shadow = shadow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle the calls named above; pass everything else on."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._sdpa(*args, **kwargs)
        if func is torch.Tensor.tolist and args[0].device.type == "meta":
            return self._shadow.to_list(args[0])
        if func is torch.Tensor.numpy and args[0].device.type == "meta":
            return torch.tensor(self._shadow.to_list(args[0]), dtype=args[0].dtype).numpy()
        if func is _GET_ITEM and args[0].is_meta:
            return func(args[0], _with_values(args[1]))
        return func(*args, **kwargs)

    def _sdpa(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        lead = query.shape[:-2]  # torch allows any number of leading dimensions; the op takes [B, H, S, D]
        q, k, v = (_four_dimensional(t) for t in (query, key, value))
        mask = attn_mask if attn_mask is None or attn_mask.dim() == 4 else attn_mask.expand(*q.shape[:3], k.shape[2])
        out = self._attention.call(
            q, k, v, mask, bias=None, sinks=None, scale=scale, softcap=None, causal=is_causal and attn_mask is None
        )
        return out.transpose(1, 2).reshape(*lead, query.shape[-2], value.shape[-1])


def _with_values(index: Any) -> Any:
    """Lists in an index as CPU tensors: torch would make meta tensors of them, unseen, and their values were lost."""
    if isinstance(index, tuple):
        return tuple(_with_values(part) for part in index)
    return torch.tensor(index, device="cpu") if isinstance(index, list) and index else index


def _four_dimensional(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() == 3:
        return tensor.unsqueeze(1)
    return tensor if tensor.dim() == 4 else tensor.reshape(-1, *tensor.shape[-3:])
