"""Patches of bytes whose boundaries depend on weights (BLT): taken to have the length the config names.

The patcher, a small language model, starts a patch where the entropy of its prediction passes a threshold. On meta no
entropy has a value, so a regular one is given and recorded as an assumption; with real weights nothing is assumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from introspect.hooks.shadow import Shadow


@contextmanager
def assumed_patches(model: nn.Module, shadow: Shadow) -> Iterator[None]:
    """Give the patchers of `model` entropies of regular patches where theirs are unknown; undone on exit."""
    patchers: list[Any] = [part for part in model.modules() if hasattr(part, "patch_lengths_from_entropies")]
    try:
        for patcher in patchers:
            patcher.patch_lengths_from_entropies = partial(_lengths, shadow, patcher.patch_lengths_from_entropies)
        yield
    finally:
        for patcher in patchers:
            del patcher.patch_lengths_from_entropies


def _lengths(shadow: Shadow, original: Any, *, entropies: Any, patch_size: int, threshold: float, **rest: Any) -> Any:
    if not shadow.knows(entropies):
        starts = torch.arange(entropies.shape[-1]) % patch_size == 0
        value = torch.where(starts, threshold + 1.0, threshold - 1.0).expand(entropies.shape)
        shadow.give_later(entropies, lambda: value.to(entropies.dtype))
        shadow.assume("patch boundaries", f"one every {patch_size} bytes")
    return original(entropies=entropies, patch_size=patch_size, threshold=threshold, **rest)
