"""Classes that a repository brings in its own Python files, for a user who said --trust-remote-code.

transformers imports them (and copies them to its own module cache); nothing here runs for a source that is not trusted.
"""

from __future__ import annotations

from typing import Any

from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from introspect.errors import BuildError
from introspect.hooks import architecture
from introspect.hooks.quirks import repaired
from introspect.sizes import check_sizes
from introspect.sources import Source

MODEL_KEYS = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM", "AutoModel")


def choose(source: Source) -> architecture.Architecture:
    """The classes that auto_map names. Without a model class in it, the choice is transformers' own."""
    auto_map = source.config["auto_map"]
    key = next((key for key in MODEL_KEYS if key in auto_map), None)
    if key is None:
        return architecture.choose(source)
    check_sizes(source.id, source.config)
    raw, notes = repaired(source.config)
    if "AutoConfig" in auto_map:
        config_class = _imported(source, auto_map["AutoConfig"])
    elif (model_type := raw.get("model_type") or "") in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[model_type]
    else:
        raise BuildError(source.id, "auto_map names no AutoConfig", "add it, or a model_type transformers knows")
    config = architecture.read_config(source, config_class, raw)
    notes += (f"built with the repository's own code: {auto_map[key]}",)
    return architecture.Architecture(model_class=_imported(source, auto_map[key]), config=config, notes=notes)


def _imported(source: Source, reference: str) -> Any:
    try:
        return get_class_from_dynamic_module(reference, str(source.directory), local_files_only=source.offline)
    except Exception as error:  # the repository's code may fail in any way while it is imported
        problem = f"importing {reference} raised {type(error).__name__}: {architecture.one_line(error)}"
        raise BuildError(source.id, problem, "install what it needs, or use another revision of the code") from error
