"""What one config field of another model is worth: the model with only that field taken over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from introspect.hooks.build import quiet
from introspect.hooks.config_fields import fields_of, read
from introspect.hooks.shrink import build_on_meta


def gather_substitutions(module: nn.Module, others: Mapping[str, Any]) -> dict[str, int | None]:
    """Parameters (tied once) that each field of `others` alone adds to the model; None where it cannot be built so."""
    if not isinstance(module, PreTrainedModel):
        return dict.fromkeys(others)
    own = fields_of(module.config)
    with quiet():
        before = _parameters(module)
        return {name: _delta(module, {**own, name: value}, before) for name, value in others.items()}


def _delta(module: PreTrainedModel, fields: dict[str, Any], before: int) -> int | None:
    try:
        return _parameters(build_on_meta(type(module), read(type(module.config), fields))) - before
    except Exception:  # a config or model class may refuse a single field in any way
        return None


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
