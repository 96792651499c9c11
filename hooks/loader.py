"""transformers' own loading of a checkpoint, on the meta device: names, shapes and dtypes without a weight.

What `from_pretrained` does between building a model and giving it back is called here step by step: its conversion
mapping, its loader, its tying, its rules of keys to ignore. `from_pretrained` itself would dequantise fp8 silently,
lose all findings when one conversion fails, and take three times as long (it copies a converter for every tensor).
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedModel, core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging as transformers_logging

State = dict[str, torch.Tensor]
Conversion = WeightConverter | WeightRenaming
Conversions = list[Conversion]


@dataclass(frozen=True, slots=True)
class Landing:
    """Where a tensor goes: the (first) parameter, and the converter that it passes on the way."""

    parameter: str
    converter: WeightConverter | None

    @property
    def parameters(self) -> tuple[str, ...]:
        """All parameters it goes into: a converter may split it (a fused qkv)."""
        if self.converter is None:
            return (self.parameter,)
        first, *others = self.converter.target_patterns
        return (self.parameter, *(self.parameter.replace(first, other) for other in others))

    @property
    def unpacked(self) -> bool:
        """Whether a quantiser's operation, not the parameter, decides its dtype and shape."""
        return any(hasattr(operation, "hf_quantizer") for operation in getattr(self.converter, "operations", ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What the loader said. Parameters are named as in the model, tensors as in the checkpoint.

    `before`: the model's state as it waited for the tensors. `landings`: of the tensors that reach a parameter.
    `ignored`: tensors that reach none and that the class leaves out on purpose.
    """

    before: State
    landings: dict[str, Landing]
    missing: frozenset[str]
    mismatched: dict[str, tuple[int, ...]]
    failed: dict[str, str]
    unexpected: tuple[str, ...]
    ignored: tuple[str, ...]


def conversions(model: PreTrainedModel, quantiser: HfQuantizer | None) -> Conversions:
    """transformers' renamings and conversions from this model's checkpoints, fresh: they remember what they matched."""
    return cast(Conversions, get_model_conversion_mapping(model, None, quantiser))


def load(
    model: PreTrainedModel,
    tensors: State,
    quantiser: HfQuantizer | None,
    dtype: torch.dtype,
    mapping: Conversions,
) -> Loaded:
    """Load meta `tensors` into a meta `model` built under no_tie_weights and prepared by its quantiser.

    The model is filled and tied on return, and knows which conversions were used: see `expected_state`.
    """
    before = model.state_dict()
    config = LoadStateDictConfig(
        device_map={"": "meta"},
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        hf_quantizer=quantiser,
        weight_mapping=mapping,
    )
    with _watched() as renamed, quiet():
        info, _ = convert_and_load_state_dict_in_model(model, tensors, config)
        model.mark_tied_weights_as_initialized(info)
        model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
        all_unexpected = set(info.unexpected_keys)
        model._adjust_missing_and_unexpected_keys(info)
    by_pattern = _by_pattern(mapping)
    strays = {name: target for name, (target, _) in renamed.items() if target not in before}
    return Loaded(
        before=before,
        landings={n: Landing(t, by_pattern.get(pattern)) for n, (t, pattern) in renamed.items() if t in before},
        missing=frozenset(info.missing_keys),
        mismatched={name: tuple(found) for name, found, _ in info.mismatched_keys},
        failed={name: _last_line(text) for name, text in info.conversion_errors.items()},
        unexpected=tuple(n for n, target in strays.items() if target in info.unexpected_keys),
        ignored=tuple(n for n, target in strays.items() if target in all_unexpected - info.unexpected_keys),
    )


def land(names: Iterable[str], model: PreTrainedModel, state: State, mapping: Conversions) -> dict[str, Landing]:
    """Where tensors of these names would go, without loading any; names that reach no parameter are left out."""
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = _by_pattern(mapping)
    landings: dict[str, Landing] = {}
    for name in names:
        parameter, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if parameter not in state and name in state:
            parameter, pattern = name, None
        if parameter in state:
            landings[name] = Landing(parameter, by_pattern.get(pattern))
    return landings


def expected_state(model: PreTrainedModel, state: State, mapping: Conversions) -> State:
    """The model's `state` as its checkpoint names and cuts it: the conversions that were used, reverted.

    `mapping` has been through `load` or `land`. A conversion that cannot be reverted leaves the model's own names.
    """
    vars(model)["_weight_conversions"] = [entry for entry in mapping if entry.was_used()]
    try:
        return cast(State, revert_weight_conversion(model, state))
    except Exception:  # an operation without a reverse
        return dict(state)


def _by_pattern(mapping: Conversions) -> dict[str | None, WeightConverter]:
    return {
        pattern: entry for entry in mapping if isinstance(entry, WeightConverter) for pattern in entry.source_patterns
    }


@contextmanager
def _watched() -> Iterator[dict[str, tuple[str, str | None]]]:
    """While the loader runs: note where each tensor lands, and copy converters without their shared parts.

    The loader deep-copies a converter, with its compiled patterns and operations, for each tensor of each expert:
    90,000 times and 8 of 12 seconds for DeepSeek-V3. Operations hold no state, only the collected tensors must be new.
    """
    landings: dict[str, tuple[str, str | None]] = {}
    rename, copy = core_model_loading.rename_source_key, core_model_loading.deepcopy

    def noting_rename(source_key: str, *args: Any, **kwargs: Any) -> tuple[str, str | None]:
        landings[source_key] = found = rename(source_key, *args, **kwargs)
        return found

    core_model_loading.rename_source_key = noting_rename
    core_model_loading.deepcopy = _copy_converter  # type: ignore[assignment]
    asynchronous = os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # there is nothing to wait for on meta
    try:
        yield landings
    finally:
        core_model_loading.rename_source_key, core_model_loading.deepcopy = rename, copy
        if asynchronous is None:
            del os.environ["HF_DEACTIVATE_ASYNC_LOAD"]
        else:
            os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = asynchronous


def _copy_converter(converter: Conversion) -> Conversion:
    copy = object.__new__(type(converter))
    for owner in type(converter).__mro__:
        for slot in getattr(owner, "__slots__", ()):
            if hasattr(converter, slot):
                object.__setattr__(copy, slot, getattr(converter, slot))
    copy.collected_tensors = defaultdict(list)
    copy.layer_targets = defaultdict(set)
    return copy


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the loader's report and bar off stderr: the findings say the same, and more."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip() and not line.startswith("Error: ")]
    return re.sub(r"^\w*(Error|Exception): ", "", lines[-1]) if lines else "no reason given"
