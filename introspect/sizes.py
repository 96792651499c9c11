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

MAX_COUNT = 10_000
MAX_WIDTH = 2**28
COUNT = re.compile(r"(.*_)?(layers|heads|experts|experts_per_tok|blocks)|n_layer|n_head")
WIDTH = re.compile(
    r"(.*_)?(size|dim|rank|embd|inner)|d_(model|ff|kv|inner|state|conv)|n_positions|max_position_embeddings"
)
NOT_SIZES = re.compile(
    r".*(first|start|window|chunk|block|page|id|image|patch|dropout|ratio|factor).*|.*_(at|in|on)_.*"
)
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
    for prefix, part in _parts(config):
        for name, value in part.items():
            if is_size(name):
                _check_size(source, prefix, name, value)
        _check_heads(source, prefix, part)
        _check_experts(source, prefix, part)


def is_size(name: str) -> bool:
    """Whether a config field of this name holds a size."""
    return bool(COUNT.fullmatch(name) or WIDTH.fullmatch(name)) and not NOT_SIZES.fullmatch(name)


def _parts(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield prefix, config
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("_config") and name != "quantization_config":
            yield from _parts(value, f"{prefix}{name}.")


def _check_size(source: str, prefix: str, name: str, value: object) -> None:
    if value is None or isinstance(value, dict):
        return
    least = 1 if name in REQUIRED else 0
    most = MAX_COUNT if COUNT.fullmatch(name) else MAX_WIDTH
    for size in value if isinstance(value, list) else [value]:
        if size is None or (isinstance(size, bool) and name not in REQUIRED):  # a flag: share_heads
            continue
        if isinstance(size, bool) or not isinstance(size, int) or not least <= size <= most:
            raise ConfigError(source, prefix + name, value, f"a whole number from {least} to {most}")


def _check_heads(source: str, prefix: str, part: dict[str, Any]) -> None:
    """Query heads share key/value heads evenly; without a head width of its own, heads cut the hidden size evenly."""
    heads, kv_heads, hidden = (part.get(n) for n in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
    if not isinstance(heads, int):
        return
    if isinstance(kv_heads, int) and heads % kv_heads:
        expected = f"a divisor of num_attention_heads ({heads})"
        raise ConfigError(source, prefix + "num_key_value_heads", kv_heads, expected)
    own_width = any(name.endswith(("head_dim", "kv_channels", "attention_head_size", "d_kv")) for name in part)
    if isinstance(hidden, int) and hidden % heads and not own_width:
        expected = f"a divisor of hidden_size ({hidden}), as no head_dim is given"
        raise ConfigError(source, prefix + "num_attention_heads", heads, expected)


def _check_experts(source: str, prefix: str, part: dict[str, Any]) -> None:
    chosen = part.get("num_experts_per_tok")
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        experts = part.get(name)
        if isinstance(chosen, int) and isinstance(experts, int) and 0 < experts < chosen:
            raise ConfigError(source, prefix + "num_experts_per_tok", chosen, f"at most {name} ({experts})")
