"""Every causal language model type of transformers with its default config, or the repaired one of tests/data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

REPAIRED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "repaired_configs.json").read_text()
)
"""Types whose default config cannot run: the reason, the fewest fields that repair it, or another class."""

TYPES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def architecture(model_type: str, **changes: Any) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """The class transformers maps this type to, and the config object it is built from (with `changes` to fields)."""
    repair = REPAIRED.get(model_type, {})
    model_class = getattr(transformers, repair.get("class", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]))
    config = CONFIG_MAPPING[model_type](**repair.get("changes", {}), **changes)
    parts = (config, config.get_text_config(decoder=True))
    return model_class, next((part for part in parts if isinstance(part, model_class.config_class)), config)
