"""A quantised config's own modules on the meta device, by transformers' quantiser where that can run without weights.

fp8 and compressed-tensors build the very modules that a load fills. For the methods of UNPACKED the quantiser cannot:
the stored parts are then put together by introspect.packed and the dense matrices they stand for are loaded instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from copy import deepcopy
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer

from introspect.hooks.loader import quiet

UNPACKED = {
    "gptq": "its modules come from gptqmodel, which needs a compiler and a GPU toolkit to install",
    "awq": "its modules come from gptqmodel, which needs a compiler and a GPU toolkit to install",
    "auto-round": "its modules come from a GPU package",
    "bitsandbytes": "its modules on meta hold unpacked weights and no absmax",
    "mxfp4": "its modules take shape from GPU kernels",
}
"""Methods whose quantiser is not asked, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """How a config is quantised. `quantiser` has prepared the model, or is None and `reason` says why.

    `known`: transformers has a quantiser of this name, so that it would load the parts where that one can run.
    """

    method: str
    bits: int | None
    quantiser: HfQuantizer | None
    known: bool = True
    reason: str = ""


def settings(config: dict[str, Any]) -> dict[str, Any] | None:
    """A raw config's quantization_config, its text part's when the whole has none; None when it is not quantised."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        if isinstance(part.get("quantization_config"), dict):
            found: dict[str, Any] = part["quantization_config"]
            return found
    return None


def prepare(model: PreTrainedModel, config: dict[str, Any], dtype: torch.dtype) -> Quantisation | None:
    """Replace the modules of a meta model as its quantiser would before a load; None when it is not quantised.

    `config` is the raw one. The model may be left half replaced when the quantiser fails: build anew.
    """
    found = settings(config)
    if found is None:
        return None
    method, bits = _method(found), _bits(found)
    if method in UNPACKED:
        return Quantisation(method=method, bits=bits, quantiser=None, reason=UNPACKED[method])
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        reason = "transformers has no quantiser of this name and takes the tensors as they are"
        return Quantisation(method=method, bits=bits, quantiser=None, known=False, reason=reason)
    try:
        with quiet(), redirect_stderr(StringIO()), _wide_pattern_cache():  # compressed-tensors draws bars
            quantiser = AutoHfQuantizer.from_config(deepcopy(found), pre_quantized=True)
            model.config.quantization_config = quantiser.quantization_config
            if method == "compressed-tensors":  # it decides here whether its FP8 kernels can run
                quantiser.validate_environment(device_map={"": "meta"})
            quantiser.preprocess_model(model=model, dtype=dtype, device_map={"": "meta"}, checkpoint_files=[])
    except Exception as error:  # a package that is not installed, or a quantiser that wants a GPU
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Quantisation(method=method, bits=bits, quantiser=None, reason=reason)
    return Quantisation(method=method, bits=bits, quantiser=quantiser)


def _method(found: dict[str, Any]) -> str:
    if found.get("load_in_4bit") or found.get("load_in_8bit"):
        return "bitsandbytes"
    return str(found.get("quant_method") or "unnamed")


def _bits(found: dict[str, Any]) -> int | None:
    """Bits per weight where the settings name one credible number for all."""
    if found.get("bits") in range(1, 17):
        return int(found["bits"])
    groups = found.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    numbers = {repr(entry.get("num_bits")): entry.get("num_bits") for entry in weights if isinstance(entry, dict)}
    only = next(iter(numbers.values())) if len(numbers) == 1 else None
    return only if only in range(1, 17) else None


@contextmanager
def _wide_pattern_cache() -> Iterator[None]:
    """Let `re` keep more than its 512 patterns.

    A quantiser matches every module against every name it is to leave alone; the 712 of GLM-5.1-FP8 push each other out
    of the cache, and compiling them again and again takes 63 s instead of 1.
    """
    before = getattr(re, "_MAXCACHE", None)
    if before is not None:
        setattr(re, "_MAXCACHE", 2**16)  # noqa: B010  (not in re's stubs)
    try:
        yield
    finally:
        if before is not None:
            setattr(re, "_MAXCACHE", before)  # noqa: B010
