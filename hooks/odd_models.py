"""Models that take more than token ids, or keep their state elsewhere than in a cache object; each with its reason.

What is odd is recognised by what the module has, except where only its code shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from introspect.hooks.caches import Held
from introspect.hooks.step import accepted_inputs
from introspect.records import RunShape

# CPM-Ant prepends its prompt and slices the cached prefix off itself: every step is given all ids so far.
_TAKES_ALL_IDS = frozenset({"CpmAntForCausalLM"})
BORROWED = "a draft model: one new token against its target's keys and values of {} tokens"


def step_ids(model: nn.Module, run: RunShape) -> int:
    """Ids a sequence that the step itself is given: the new ones, or all so far."""
    return run.context + run.seq if type(model).__name__ in _TAKES_ALL_IDS else run.seq


def id_rows(model: nn.Module, batch: int) -> int:
    """Rows of ids for `batch` sequences. MusicGen's decoder takes the ids of its codebooks as rows of their own."""
    return batch * int(getattr(model, "num_codebooks", 1))


def borrowed_inputs(model: nn.Module, run: RunShape) -> dict[str, Any] | None:
    """Inputs of a draft model that reads another model's hidden states, keys and values and drafts one token at a time
    (Gemma 4's assistants): shapes alone on meta, random values for a real module. None for every other model."""
    if not {"inputs_embeds", "shared_kv_states"} <= accepted_inputs(model) or not hasattr(model, "pre_projection"):
        return None
    module: Any = model
    like = module.pre_projection.weight
    keys = run.context + run.seq
    shared = {}
    for part in module.modules():
        if getattr(part, "is_kv_shared_layer", False):
            heads = part.config.num_attention_heads // part.num_key_value_groups
            shape = (run.batch, heads, keys, part.head_dim)
            shared[part.layer_type] = (_some(like, *shape), _some(like, *shape))
    return {
        "inputs_embeds": _some(like, run.batch, 1, module.pre_projection.in_features),
        "shared_kv_states": shared,
        "position_ids": torch.full((run.batch, 1), keys - 1),
    }


def _some(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_seeded(like.device), dtype=like.dtype, device=like.device)


def _seeded(device: torch.device) -> torch.Generator | None:
    return None if device.type == "meta" else torch.Generator(device).manual_seed(0)


def own_cache(model: nn.Module) -> Any:
    """A cache to be passed to a model that would make its own and not give it back (RecurrentGemma), else None."""
    return DynamicCache(config=model.config) if hasattr(model, "_setup_cache") else None  # type: ignore[arg-type]


def states_in_modules(model: nn.Module) -> list[Held]:
    """The recurrent states that such a model's modules hold as plain attributes."""
    return [
        Held(_layer(path), type(module).__name__, name, value) for path, module, name, value in _plain_tensors(model)
    ]


def forget_states(model: nn.Module) -> None:
    """Take the states out again: the next run starts anew."""
    for _, module, name, _ in list(_plain_tensors(model)):
        setattr(module, name, None)


def _plain_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    if not hasattr(model, "_setup_cache"):
        return
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield path, module, name, value


def _layer(path: str) -> int:
    return next((int(part) for part in path.split(".") if part.isdigit()), 0)
