"""What a step is given and what it leaves: token ids with values, and the cache and saved bytes found afterwards."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from introspect.hooks.caches import Held
from introspect.hooks.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a run leaves beside the recorded ops: the cache before and after, the bytes that Trace reports of a training
    step, and what was taken for granted."""

    before: tuple[Held, ...] = ()
    after: tuple[Held, ...] = ()
    assumptions: tuple[str, ...] = ()
    saved_bytes: int | None = None
    saved: tuple[int, ...] = ()
    recomputed_bytes: int | None = None


def ids_name(accepted: set[str]) -> str:
    """The argument that takes the token ids."""
    return "input_ids" if "input_ids" in accepted or "decoder_input_ids" not in accepted else "decoder_input_ids"


def accepted_inputs(model: nn.Module) -> set[str]:
    """Names of the arguments of the model's forward."""
    return set(inspect.signature(model.forward).parameters)


def token_ids(session: Session, model: nn.Module, batch: int, tokens: int) -> torch.Tensor:
    """Token ids [batch, tokens] on the model's device, with values: plain tokens, none of the config's special ones."""
    config = getattr(model, "config", None)
    vocabulary, special = _vocabulary(config)
    first = next(iter(model.parameters()), None)
    if first is None:
        raise ValueError("it has no parameters, so no language model: give its inputs")
    device = first.device

    def values() -> torch.Tensor:
        plain = torch.tensor([i for i in range(vocabulary) if i not in special][:4096] or [0])
        return plain[(torch.arange(batch * tokens) * 769 + 11) % len(plain)].view(batch, tokens)

    if device.type != "meta":
        return values().to(device)
    return session.shadow.give_later(torch.empty((batch, tokens), dtype=torch.int64, device="meta"), values)


def _vocabulary(config: Any) -> tuple[int, set[int]]:
    """Vocabulary size and the ids with a meaning of their own (padding, images), wherever the config keeps them."""
    size, special = 0, set()
    pending = [config.to_dict()] if config is not None and hasattr(config, "to_dict") else []
    for fields in pending:
        for name, value in fields.items():
            if isinstance(value, dict):
                pending.append(value)
            elif name == "vocab_size" and isinstance(value, int):
                size = value if size == 0 else min(size, value)
            elif isinstance(value, int) and ("token_id" in name or "token_index" in name):
                special.add(value)
    return size or 256, special
