"""Sources made from a config in a test, as resolve() makes them from a file."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

from introspect.sources import Source

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
"""A small Llama that names every size."""


def source_of(config: dict[str, Any], id: str = "test.json", **more: Any) -> Source:
    """The source of this raw config."""
    digest = sha256(json.dumps(config).encode()).hexdigest()
    return Source(id=id, kind="object", text="test", config=config, config_sha256=digest, digest=digest, **more)
