"""Sizes in a config that no model can have, refused before anything is built.

Only fields whose name says that they are a size are judged, in the config and in the parts nested in it (text_config,
vision_config ...). A field that is null is the class's default; a list is a size per layer. The upper bounds are far
above any model and keep a slip (10**12 layers) from running for hours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from introspect.errors import ConfigError

BOUNDS = (
    (re.compile(r"(.*_)?(layers|blocks)|n_layer"), 10_000),
    (re.compile(r"(.*_)?(heads|experts|experts_per_tok)|n_head"), 100_000),
    (
        re.compile(
            r"(.*_)?((?<!chunk_)(?<!window_)size|dim|rank|embd|inner|positions)|d_(model|ff|kv|state|conv)|.*position_embeddings"
        ),
        2**28,
    ),
)
"""Names that are sizes, and the largest one of each kind. (A chunk or window of -1 is none at all: not judged.)"""
REQUIRED = frozenset(
    {
        *("hidden_size", "d_model", "n_embd", "head_dim"),
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        *("num_attention_heads", "n_head", "n_heads", "num_key_value_heads"),
        *("vocab_size", "max_position_embeddings", "n_positions"),
    }
)
"""Sizes that no model has as zero."""


def check_sizes(source: str, config: dict[str, Any]) -> None:
    """Raise ConfigError for the first size that is no whole number, is out of bounds or does not fit another."""
    for prefix, part in _parts(source, config):
        for name, value in part.items():
            if (bound := bound_of(name)) is not None:
                _check_size(source, prefix, name, value, bound)
        _check_heads(source, prefix, part)
        _check_experts(source, prefix, part)


def bound_of(name: str) -> int | None:
    """The largest size a config field of this name may hold; None when the name is not that of a size."""
    return next((bound for pattern, bound in BOUNDS if pattern.fullmatch(name)), None)


def _parts(source: str, config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield prefix, config
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("_config") and name != "quantization_config":
            yield from _parts(source, value, f"{prefix}{name}.")
        elif name == "text_config" and value is not None:
            raise ConfigError(source, prefix + name, value, "an object, the config of the text model")


def _check_size(source: str, prefix: str, name: str, value: object, most: int) -> None:
    least = 1 if name in REQUIRED else 0
    for size in value if isinstance(value, list) else [value]:
        if size is None or isinstance(size, dict | list) or (isinstance(size, bool | str) and name not in REQUIRED):
            continue  # a default, a table, a flag (share_heads), or the kind of each layer
        if isinstance(size, bool) or not isinstance(size, int) or not least <= size <= most:
            raise ConfigError(source, prefix + name, value, f"a whole number from {least} to {most}")


def _check_heads(source: str, prefix: str, part: dict[str, Any]) -> None:
    """Query heads share key/value heads evenly. (Whether they cut the hidden size evenly is for each class to say.)"""
    heads, kv_heads = part.get("num_attention_heads"), part.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        expected = f"a divisor of num_attention_heads ({heads})"
        raise ConfigError(source, prefix + "num_key_value_heads", kv_heads, expected)


def _check_experts(source: str, prefix: str, part: dict[str, Any]) -> None:
    chosen = part.get("num_experts_per_tok")
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        experts = part.get(name)
        if isinstance(chosen, int) and isinstance(experts, int) and 0 < experts < chosen:
            raise ConfigError(source, prefix + "num_experts_per_tok", chosen, f"at most {name} ({experts})")
