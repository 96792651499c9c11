"""From a raw config to a transformers class and its config object, or one clear line why not.

The class is the one that `architectures` names when it fits the config's model_type, so that a multimodal wrapper keeps
its towers and a base model gets no head; otherwise the one that transformers maps the model_type to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from introspect.errors import BuildError, ConfigError, UnknownArchitectureError
from introspect.hooks.quirks import repaired
from introspect.sizes import bound_of, check_sizes
from introspect.sources import Source

NAMED_SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A class, the config object it is built from, and what was decided on the way (`notes`)."""

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    notes: tuple[str, ...]


def choose(source: Source) -> Architecture:
    """The class and config of a source whose code is transformers' own.

    Raises ConfigError for a field no class accepts, UnknownArchitectureError when the installed transformers has no
    class, BuildError for anything else that its config code raises.
    """
    check_sizes(source.id, source.config)
    raw, notes = repaired(source.config)
    named = next(filter(None, map(_model_class, raw.get("architectures") or ())), None)
    model_type = raw.get("model_type") or ""
    if model_type in CONFIG_MAPPING:
        config = read_config(source, CONFIG_MAPPING[model_type], raw)
        if not config.sub_configs and len(_sizes_not_given(type(config), raw)) == len(NAMED_SIZES):
            notes += (f"the config gives no sizes: they are the defaults of {type(config).__name__}",)
        fitting = None if named is None else _fitting(named, config)
        if named is None or fitting is None:
            return _as_decoder(_by_model_type(source, config, notes))
        return _as_decoder(Architecture(model_class=named, config=fitting, notes=notes))
    if named is None:
        raise _unknown(source)
    return _by_class(source, named, raw, notes)


def read_config(source: Source, config_class: type[PreTrainedConfig], raw: dict[str, Any]) -> PreTrainedConfig:
    """The config object of `raw`; what its class refuses becomes a ConfigError or BuildError."""
    try:
        return config_class.from_dict(_decoded(raw))
    except StrictDataclassFieldValidationError as error:
        field = re.search(r"field '([^']+)'", str(error))
        cause = one_line(error.__cause__ or error)
        wanted = re.search(r"expected (.+?), got", cause)
        if field and wanted and field[1] in raw:
            raise ConfigError(source.id, field[1], raw[field[1]], wanted[1]) from None
        raise _refused(source, config_class, cause) from None
    except StrictDataclassClassValidationError as error:
        raise _refused(source, config_class, one_line(error.__cause__ or error)) from None
    except Exception as error:  # any line of the config class may stumble over a value it did not expect
        problem = f"{config_class.__name__} cannot read the config: {type(error).__name__}: {one_line(error)}"
        raise BuildError(source.id, problem, "correct the config") from None


def _refused(source: Source, config_class: type[PreTrainedConfig], cause: str) -> BuildError:
    return BuildError(source.id, f"{config_class.__name__} refuses the config: {cause}", "correct the config")


def text_part(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the text decoder: a part of a composite config, or the whole."""
    part = config.get_text_config(decoder=True)
    return part if isinstance(part, PreTrainedConfig) else config  # a class without parts keeps a stray one as it is


def one_line(error: BaseException) -> str:
    """An error's message without line breaks."""
    return " ".join(str(error).split())


def _by_model_type(source: Source, config: PreTrainedConfig, notes: tuple[str, ...]) -> Architecture:
    """The class that transformers' own tables give for this model_type, a causal language model first."""
    tables: tuple[Mapping[str, str | Sequence[str]], ...] = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_MAPPING_NAMES,
    )
    names = next((table[config.model_type] for table in tables if config.model_type in table), "")
    name = names if isinstance(names, str) else names[0]
    if (model_class := _model_class(name)) is None:
        raise _unknown(source)
    fitting = _fitting(model_class, config) or config
    if asked := ", ".join(source.config.get("architectures") or ()):
        notes += (f"architectures names {asked}; built as {name}, the class of model_type {config.model_type!r}",)
    elif fitting is not config:
        notes += (f"architectures names no class; built as {name}, the text part of model_type {config.model_type!r}",)
    return Architecture(model_class=model_class, config=fitting, notes=notes)


def _as_decoder(chosen: Architecture) -> Architecture:
    """BERT-like classes used as a causal language model mask and cache like one only when is_decoder says so."""
    config, name = chosen.config, chosen.model_class.__name__
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type) == name
    if not causal or config.is_encoder_decoder or getattr(config, "is_decoder", True):
        return chosen
    config.is_decoder = True
    if config.model_type not in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return chosen
    return replace(chosen, notes=(*chosen.notes, f"is_decoder was false; set, since {name} decodes"))


def _by_class(
    source: Source, named: type[PreTrainedModel], raw: dict[str, Any], notes: tuple[str, ...]
) -> Architecture:
    """model_type is unknown, but `architectures` names a class: its config class reads the file if it has the sizes."""
    config_class = named.config_class
    if config_class is None:
        raise _unknown(source)
    if missing := _sizes_not_given(config_class, raw):
        detail = f"; {named.__name__} would need {', '.join(missing)}, which the config does not give"
        raise _unknown(source, detail)
    read = {field.name for field in fields(config_class)} | set(config_class.attribute_map)
    unread = sorted(name for name in raw.keys() - read if bound_of(name))
    note = (
        f"model_type {raw.get('model_type')!r} is not in transformers {transformers.__version__}; built as "
        f"{named.__name__}, which architectures names" + (f" (it does not read {', '.join(unread)})" if unread else "")
    )
    bare = {name: value for name, value in raw.items() if name != "model_type"}
    return Architecture(model_class=named, config=read_config(source, config_class, bare), notes=(*notes, note))


def _sizes_not_given(config_class: type[PreTrainedConfig], raw: dict[str, Any]) -> list[str]:
    """Which of NAMED_SIZES neither the config nor its text part gives, under either name the class reads it by."""
    given = {name for name, value in (raw | (raw.get("text_config") or {})).items() if value is not None}
    return [name for name in NAMED_SIZES if not given & {name, config_class.attribute_map.get(name, name)}]


def _fitting(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedConfig | None:
    """`config`, or its text part, whichever the class is built from; None when it is built from neither."""
    wanted = model_class.config_class
    if wanted is None or isinstance(config, wanted):
        return None if wanted is None else config
    text = text_part(config)
    return text if isinstance(text, wanted) else None


def _model_class(name: str) -> type[PreTrainedModel] | None:
    found = getattr(transformers, name, None)
    return found if isinstance(found, type) and issubclass(found, PreTrainedModel) else None


def _decoded(value: Any) -> Any:
    """A deep copy in which {"__float__": "Infinity"}, as transformers writes it for strict JSON, is a float."""
    if isinstance(value, dict):
        tag = value.get("__float__")
        return float(tag) if tag in {"Infinity", "-Infinity", "NaN"} else {k: _decoded(v) for k, v in value.items()}
    return [_decoded(item) for item in value] if isinstance(value, list) else value


def _unknown(source: Source, detail: str = "") -> UnknownArchitectureError:
    model_type = source.config.get("model_type")
    architecture = next(iter(source.config.get("architectures") or ()), None)
    near = get_close_matches(str(model_type), CONFIG_MAPPING.keys(), n=2)
    remedy = f"transformers {transformers.__version__} has no such class{detail}; "
    if near:
        remedy += f"did you mean {' or '.join(near)}? "
    if source.config.get("auto_map"):
        remedy += (
            "the model brings its own code (auto_map): read it, then pass --trust-remote-code with its folder or id"
        )
    else:
        remedy += "a newer transformers may know it (pip install --upgrade transformers)"
    return UnknownArchitectureError(source.id, model_type, architecture, remedy)
