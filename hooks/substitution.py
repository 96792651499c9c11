"""What one config field of another model is worth: the model with only that field taken over, built and run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from introspect.hooks.architecture import text_part
from introspect.hooks.build import quiet
from introspect.hooks.config_fields import fields_of, read
from introspect.hooks.dtypes import torch_dtype
from introspect.hooks.observe import observe
from introspect.hooks.shrink import IDENTITY, build_on_meta
from introspect.records import RunShape, Trace
from introspect.substitution_record import Substituted

AS_IS = ""  # the key of the model itself, built the same way


def gather_substitutions(module: nn.Module, others: Mapping[str, Any], run: RunShape) -> dict[str, Substituted | None]:
    """The model as it is (under "") and with each field of `others` alone; None where it cannot be built so."""
    if not isinstance(module, PreTrainedModel):
        return dict.fromkeys((AS_IS, *others))
    own = fields_of(module.config)
    with quiet():
        found = {AS_IS: _built(module, own, run)}
        for name, value in others.items():
            # the library's older name of the one field, which would not replace the newer one
            field = "dtype" if name == "torch_dtype" else name
            found[name] = _built(module, {**own, field: value}, run)
    return found


def _built(module: PreTrainedModel, fields: dict[str, Any], run: RunShape) -> Substituted | None:
    try:
        config = read(type(module.config), fields)
        dtype = _dtype(config, module, run)
        model = build_on_meta(type(module), config).to(dtype)
    except Exception:  # a config or model class may refuse a single field in any way
        return None
    return Substituted(parameters=_parameters(model), trace=_observed(model, run))


def _dtype(config: PreTrainedConfig, module: PreTrainedModel, run: RunShape) -> torch.dtype:
    """The dtype of the run, else the config's or its text part's, else the module's own."""
    named = run.dtype or config.dtype or text_part(config).dtype or module.dtype
    return named if isinstance(named, torch.dtype) else torch_dtype(named)


def _observed(model: nn.Module, run: RunShape) -> Trace | None:
    try:
        return observe(model, IDENTITY, run)
    except Exception:  # sizes that build need not run
        return None


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
