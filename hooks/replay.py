"""Run a model again on the inputs it was called with, without any of our hooks: the library's own kernels answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from introspect.hooks.odd_models import forget_states, own_cache
from introspect.hooks.run import cache_of
from introspect.hooks.session import EXPERTS_CHOICE


@dataclass(slots=True)
class Heard:
    """One call of a model: its keyword inputs and the logits it returned."""

    inputs: dict[str, Any]
    logits: torch.Tensor


@contextmanager
def listening(model: nn.Module) -> Iterator[list[Heard]]:
    """Note every call of the model itself while active."""
    heard: list[Heard] = []

    def note(_: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any], output: Any) -> None:
        heard.append(Heard(inputs, _logits(output)))

    handle = model.register_forward_hook(note, with_kwargs=True)
    try:
        yield heard
    finally:
        handle.remove()


def replayed(model: nn.Module, heard: list[Heard]) -> list[torch.Tensor]:
    """The logits of the same calls by the library's own attention and eager experts (grouped_mm refuses rows that are
    no multiple of 16 bytes). A call that was given a cache gets the one that the call before it left here."""
    for module in model.modules():
        if hasattr(config := getattr(module, "config", None), EXPERTS_CHOICE):
            setattr(config, EXPERTS_CHOICE, "eager")
    name, cache, logits = "cache", own_cache(model), []
    with torch.no_grad():
        for call in heard:
            inputs = call.inputs | ({name: cache} if call.inputs.get(name) is not None else {})
            output = model(**inputs)
            name, cache = cache_of(output) if cache_of(output)[1] is not None else (name, cache)
            logits.append(_logits(output))
    forget_states(model)
    return logits


def _logits(output: Any) -> torch.Tensor:
    logits: torch.Tensor = output.logits if getattr(output, "logits", None) is not None else output[0]
    return logits
