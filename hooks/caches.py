"""The model's own cache object: what it holds, and filling it to a long context without running a long prefill.

Every transformers cache layer is read through its attributes, since states sit in tensors, lists and dicts. A filled
cache is made by a short real prefill and then each layer's own `update` with rows that have a shape and no values: the
real class does window truncation, lengths and positions. A layer class that is defined outside transformers' cache
module keeps state that `update` alone does not explain; such a model is prefilled for real.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import cache_utils

SHORT_PREFILL = 4  # tokens of the real prefill before a cache is filled; convolution states need a few


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor of the cache: which layer (and its class) holds it under which name."""

    layer: int
    layer_class: str
    name: str
    tensor: torch.Tensor
    window: int | None = None

    @property
    def is_state(self) -> bool:
        """Whether this is a recurrent or convolution state rather than rows of keys, values or indexer keys."""
        return not self.name.removeprefix("cross.").startswith(("keys", "values", "indexer"))


def held_tensors(cache: Any) -> list[Held]:
    """Every tensor with elements that the cache holds now, in layer order."""
    found: dict[int, Held] = {}
    for index, (prefix, layer) in enumerate(_layers(cache)):
        for name, tensor in _tensors(vars(layer) if hasattr(layer, "__dict__") else layer):
            if tensor.numel() and tensor.dim() > 0 and id(tensor) not in found:
                window = getattr(layer, "sliding_window", None)
                found[id(tensor)] = Held(_number(cache, index), type(layer).__name__, prefix + name, tensor, window)
    return list(found.values())


def shapes(cache: Any) -> list[tuple[int, str, tuple[int, ...]]]:
    """Place and shape of every tensor that the cache holds."""
    return [(held.layer, held.name, tuple(held.tensor.shape)) for held in held_tensors(cache)]


def can_fill(cache: Any) -> bool:
    """Whether every layer's state is explained by its `update`: all classes are transformers' own."""
    return isinstance(cache, cache_utils.Cache) and all(
        type(layer).__module__ == cache_utils.__name__ for _, layer in _layers(cache)
    )


def fill(cache: Any, tokens: int) -> None:
    """Append `tokens` rows without values to every attention layer of the cache, through the layer's own update."""
    own = cache.self_attention_cache if isinstance(cache, cache_utils.EncoderDecoderCache) else cache
    layers: list[Any] = own.layers
    for layer in layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.dim() != 4:
            continue
        layer.update(_rows(keys, tokens), _rows(values, tokens))
        indexer = getattr(layer, "indexer_keys", None)
        if indexer is not None:
            layer.update_indexer(indexer.new_empty((*indexer.shape[:-2], tokens, indexer.shape[-1])))
        positions = getattr(layer, "indexer_position_ids", None)
        if positions is not None:  # appended by the model itself, not by update_indexer
            rows = positions.new_empty((*positions.shape[:-1], tokens))
            layer.indexer_position_ids = torch.cat([positions, rows], dim=-1)


def _rows(like: torch.Tensor, tokens: int) -> torch.Tensor:
    batch, heads, _, width = like.shape
    return like.new_empty((batch, heads, tokens, width))


def _layers(cache: Any) -> list[tuple[str, Any]]:
    if isinstance(cache, cache_utils.EncoderDecoderCache):
        own, cross = cache.self_attention_cache.layers, cache.cross_attention_cache.layers
        return [("", layer) for layer in own] + [("cross.", layer) for layer in cross]
    if isinstance(cache, cache_utils.Cache):
        return [("", layer) for layer in cache.layers]
    if isinstance(cache, (list, tuple)):
        return [("", [layer] if isinstance(layer, torch.Tensor) else layer) for layer in cache]
    return [] if cache is None else [("", cache)]


def _number(cache: Any, index: int) -> int:
    if isinstance(cache, cache_utils.EncoderDecoderCache):
        return index % max(1, len(cache.self_attention_cache.layers))
    return index


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            if not str(key).startswith("_"):
                yield from _tensors(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            yield from _tensors(item, f"{name}.{position}" if name else str(position))
