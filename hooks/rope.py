"""Rotary frequencies as transformers' own initialisers give them: a fact that the shapes of a run cannot show.

A rotary module of transformers carries `rope_type` and the config it was built from; its frequencies come from
`ROPE_INIT_FUNCTIONS[rope_type]`, or from its own `compute_default_rope_parameters` when nothing is scaled. Both are
evaluated here on the CPU, since the module itself lives on the meta device. GPT-J and CodeGen hold a table of sines
instead (`create_sinusoidal_positions`), and their frequencies are read back from its row of position 1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from introspect.records import Rope

Frequencies = tuple[tuple[float, ...], float]

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear"},
    "ntk": {"rope_type": "dynamic"},
    "yarn": {"rope_type": "yarn"},
    "llama3": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
"""What `--rope NAME:FACTOR` asks of transformers; the bounds of llama3 are those that Llama 3.1 ships."""


def gather_rope(model: nn.Module, length: int) -> tuple[Rope, ...]:
    """The rotary modules of `model`, one record per layer type; `length` tokens (dynamic and longrope depend on it)."""
    with torch.device("cpu"):
        return tuple(
            rope
            for path, module in model.named_modules()
            for rope in (*_initialised(path, module, length), *_tabulated(path, module))
        )


def gather_scaled_rope(model: nn.Module, length: int, scalings: tuple[str, ...]) -> tuple[Rope, ...]:
    """What each scaling (`yarn:4`) would make of each rotary module, whatever it does now; `rope_type` repeats it.

    The training length is the one before any shipped scaling. Modules without an initialiser (GPT-J) have no what-if.
    """
    with torch.device("cpu"):
        return tuple(
            _scaled(path, module, layer_type, scaling, length)
            for scaling in scalings
            for path, module in model.named_modules()
            for layer_type, _ in _rope_types(module)
        )


def _initialised(path: str, module: nn.Module, length: int) -> Iterator[Rope]:
    for layer_type, rope_type in _rope_types(module):
        yield _record(path, module, _config_of(module, layer_type), layer_type, rope_type, length)


def _scaled(path: str, module: nn.Module, layer_type: str | None, scaling: str, length: int) -> Rope:
    name, factor = scaling.split(":")
    config = deepcopy(_config_of(module, layer_type))
    training_length = _training_length(config, layer_type)
    kept = {
        key: value
        for key, value in _parameters(config, layer_type).items()
        if key in ("rope_theta", "partial_rotary_factor", "mrope_section")
    }
    changed = {
        **kept,
        **SCALINGS[name],
        "factor": float(factor),
        "original_max_position_embeddings": training_length,
    }
    config.max_position_embeddings = training_length
    if getattr(config, "head_dim", 0) is None:  # the initialisers of scalings take an absent head_dim, not an empty one
        config.head_dim = config.hidden_size // config.num_attention_heads
    config.rope_parameters = changed if layer_type is None else {**config.rope_parameters, layer_type: changed}
    record = _record(path, module, config, layer_type, changed["rope_type"], length)
    return replace(record, rope_type=scaling)


def _record(path: str, module: nn.Module, config: Any, layer_type: str | None, rope_type: str, length: int) -> Rope:
    own: Any = module
    unscaled, _ = _frequencies(own.compute_default_rope_parameters, config, layer_type)
    scaled, attention_factor = unscaled, 1.0
    if rope_type != "default":  # a class may bring an initialiser of its own (HunYuan's ntk_alpha)
        initialiser = getattr(own, f"compute_{rope_type}_rope_parameters", None) or ROPE_INIT_FUNCTIONS[rope_type]
        scaled, attention_factor = _frequencies(initialiser, config, layer_type, length)
    return Rope(
        module=path,
        layer_type=layer_type,
        rope_type=rope_type,
        base=float(_parameters(config, layer_type)["rope_theta"]),
        dim=2 * len(scaled),
        training_length=_training_length(config, layer_type),
        attention_factor=attention_factor,
        inv_freq=scaled,
        unscaled_inv_freq=unscaled,
    )


def _frequencies(initialiser: Any, config: Any, layer_type: str | None, length: int | None = None) -> Frequencies:
    options: dict[str, Any] = {} if layer_type is None else {"layer_type": layer_type}
    if length is not None:
        options["seq_len"] = length
    inv_freq, attention_factor = initialiser(config, device=torch.device("cpu"), **options)
    return tuple(inv_freq.tolist()), float(attention_factor)


def _rope_types(module: nn.Module) -> tuple[tuple[str | None, str], ...]:
    """(layer type, rope type) of each set of frequencies a rotary module holds; empty for any other module."""
    rope_type = getattr(module, "rope_type", None)
    if rope_type is None or not hasattr(module, "compute_default_rope_parameters"):
        return ()
    return tuple(rope_type.items()) if isinstance(rope_type, dict) else ((None, rope_type),)


def _config_of(module: nn.Module, layer_type: str | None) -> Any:
    """The config of one layer type, for models whose layers differ in width (Gemma 4); else the module's."""
    config: Any = module.config
    if layer_type is None:
        return config
    try:
        return config.per_layer_config[layer_type]
    except (AttributeError, ValueError):  # no such field; a field without layers in it
        return config


def _parameters(config: Any, layer_type: str | None) -> dict[str, Any]:
    return dict(config.rope_parameters if layer_type is None else config.rope_parameters[layer_type])


def _training_length(config: Any, layer_type: str | None) -> int | None:
    """Positions seen before any scaling was applied."""
    original = _parameters(config, layer_type).get("original_max_position_embeddings")
    return original or getattr(config, "max_position_embeddings", None)


def _tabulated(path: str, module: nn.Module) -> Iterator[Rope]:
    make_table = getattr(sys.modules.get(type(module).__module__), "create_sinusoidal_positions", None)
    table = getattr(module, "embed_positions", None)
    if make_table is None or not isinstance(table, torch.Tensor):
        return
    positions, dim = table.shape
    # row 1 holds sin(frequency); every frequency is at most 1, where the sine can be undone
    frequencies = tuple(make_table(2, dim)[1, : dim // 2].asin().tolist())
    yield Rope(
        module=path,
        layer_type=None,
        rope_type="default",
        base=float(f"{frequencies[1] ** (-dim / 2):.6g}"),  # the sines are float32
        dim=dim,
        training_length=positions,
        attention_factor=1.0,
        inv_freq=frequencies,
        unscaled_inv_freq=frequencies,
    )
