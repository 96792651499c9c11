"""What is changed in particular raw configs before a class reads them, each with its reason; such things live here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

RUNTIME_FIELDS = frozenset(
    {"attn_implementation", "_attn_implementation", "_attn_implementation_internal", "_experts_implementation"}
)
"""Kernel choices some files carry. They ask for packages (flash-attn) and change no parameter; a run makes its own."""

CLASS_FIELDS = frozenset({"model_type", "architectures"})
"""What says which class a config is for."""

DTYPE_FIELDS = frozenset({"dtype", "torch_dtype"})
"""Dropped where they say "auto" (the dtype of the stored weights): a config class would look it up in torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """A change of one model_type's configs that hold the field `when`. The reader is told `note`.

    `nest`: the part into which all fields go that say nothing about the class.
    """

    when: str
    note: str
    rename: dict[str, str] = field(default_factory=dict)
    change: dict[str, Any] = field(default_factory=dict)
    nest: str | None = None


REPAIRS = {
    "mistral": Repair(
        when="layer_types",
        change={"model_type": "ministral"},
        note="a mistral config with layer_types is built as ministral, as transformers' AutoConfig does",
    ),
    "hunyuan": Repair(
        when="attention_head_dim",
        rename={"attention_head_dim": "head_dim"},
        note="this config spells head_dim as attention_head_dim, which HunYuanMoEV1Config does not read",
    ),
    "step3p7": Repair(
        when="num_hidden_layers",
        nest="text_config",
        note="this config gives the text model's sizes at the top level, where Step3p7Config does not read them",
    ),
}
"""By model_type. Only what transformers itself has no general rule for."""


PREDICTORS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_transformer_layers", "num_mtp_modules")
"""Fields that give a checkpoint multi-token prediction (MTP) layers, which transformers' classes mostly leave out."""


def unbuilt_predictors(raw: dict[str, Any], modules: Iterable[str], class_name: str) -> tuple[str, ...]:
    """A note for each such field when no module path of the built model speaks of them."""
    if any("mtp" in path or "nextn" in path for path in modules):
        return ()
    parts = [raw, *(value for key, value in raw.items() if _is_part(key, value))]
    return tuple(
        f"{name} is {part[name]}: {class_name} builds no multi-token prediction (MTP) layer, so none is counted"
        for part in parts
        for name in PREDICTORS
        if isinstance(part.get(name), int) and part[name] > 0
    )


def repaired(raw: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A copy of the raw config as it is built, and a note for each change a reader should know of."""
    notes = []
    config = _without(raw, RUNTIME_FIELDS | {name for name in DTYPE_FIELDS if raw.get(name) == "auto"})
    if _holds(config, "quantization_config"):
        # The quantisers replace modules by packed ones; a format's bytes are computed from the logical matrices.
        config = _without(config, frozenset({"quantization_config"}))
        notes.append("built without its quantization_config: bytes are the logical ones (stored: `introspect quant`)")
    repair = REPAIRS.get(config.get("model_type", ""))
    if repair is not None and repair.when in config:
        config = {repair.rename.get(name, name): value for name, value in config.items()} | repair.change
        if repair.nest is not None:
            head = {name: config.pop(name) for name in CLASS_FIELDS & config.keys()}
            config = head | {repair.nest: config}
        notes.append(repair.note)
    return config, tuple(notes)


def _without(config: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    kept = {name: value for name, value in config.items() if name not in names}
    return {name: _without(value, names) if _is_part(name, value) else value for name, value in kept.items()}


def _holds(config: dict[str, Any], name: str) -> bool:
    return bool(config.get(name)) or any(_holds(value, name) for key, value in config.items() if _is_part(key, value))


def _is_part(name: str, value: object) -> bool:
    return isinstance(value, dict) and name.endswith("_config")
