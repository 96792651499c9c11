"""Build a model on the meta device as a real load would leave it: class, dtypes, ties, evaluation mode.

No weight is read or allocated. Dtypes follow transformers' loader: everything in the asked dtype (else the config's,
else bf16), except parameters the class creates or keeps in another (DeepSeek-V3's router stays fp32). Quantised configs
are built as the logical model, without their quantiser's packed modules.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.nn.parameter import is_lazy
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation
from transformers.initialization import meta_device_safe_creation_ops
from transformers.utils import logging as transformers_logging

from introspect.errors import BuildError, ConfigError, OptionError
from introspect.hooks import architecture, remote_code
from introspect.hooks.dtypes import dtype_name, torch_dtype
from introspect.hooks.factory import run_factory
from introspect.hooks.inputs import each_tensor, named_inputs
from introspect.hooks.quirks import unbuilt_predictors
from introspect.records import ModelIdentity
from introspect.sizes import bound_of
from introspect.sources import Source

COMPUTE_DTYPES = ("bf16", "fp16", "fp32", "fp64")
"""Dtypes a module can be built in, by this package's short names; torch's own names are understood too."""
BF16_ASSUMED = "the config names no dtype; bf16 assumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """A module on the meta device and what is known of it.

    `dtype` is the short name of the compute dtype. `config` is the object the module was built from (None for a plain
    module), `inputs` the example inputs given with it, by the caller or a factory, under forward's names
    (hooks/inputs.py). `assumptions` belong under every table.
    """

    module: nn.Module
    identity: ModelIdentity
    dtype: str
    config: PreTrainedConfig | None = None
    inputs: dict[str, Any] | None = None
    assumptions: tuple[str, ...] = ()


def build(model: Source | nn.Module, dtype: str | None = None, inputs: Any = None) -> BuiltModel:
    """Build a found model, or take a copy of a module, on meta.

    `dtype` ("bf16", "fp16", "fp32", "fp64") overrides the config's. A module handed in is copied without its weights
    and never changed. `inputs` are example inputs for its forward, in any form of hooks/inputs.py, and come before a
    factory's own. Raises OptionError for an unknown dtype or inputs that do not fit, ConfigError,
    UnknownArchitectureError or BuildError for what cannot be built.
    """
    asked = None if dtype is None else _asked_dtype(dtype)
    if isinstance(model, nn.Module):
        name = type(model).__name__
        return _plain(_meta_copy(model, name), name, f"module {name}", "", asked, inputs)
    if model.factory is not None:
        return _from_factory(model, model.factory, asked, inputs)
    return _from_config(model, asked, inputs)


def _from_config(source: Source, asked: str | None, inputs: Any) -> BuiltModel:
    with quiet():
        _check_dtypes(source)
        chosen = remote_code.choose(source) if source.remote_code else architecture.choose(source)
        assumptions: tuple[str, ...] = ()
        dtype = asked or _config_dtype(chosen.config)
        if dtype is None:
            dtype, assumptions = "bf16", (BF16_ASSUMED,)
        module = _instantiate(source, chosen, torch_dtype(dtype))
    identity = ModelIdentity(
        id=source.id,
        class_name=type(module).__name__,
        source=source.text,
        config_sha256=source.config_sha256,
        config=source.config | ({"hf_quant_config": source.hf_quant_config} if source.hf_quant_config else {}),
        notes=(*chosen.notes, *unbuilt_predictors(source.config, dict(module.named_modules()), type(module).__name__)),
    )
    named = None if inputs is None else named_inputs(module, inputs)
    return BuiltModel(
        module=module, identity=identity, dtype=dtype, config=chosen.config, inputs=named, assumptions=assumptions
    )


def _instantiate(source: Source, chosen: architecture.Architecture, dtype: torch.dtype) -> nn.Module:
    with ExitStack() as stack:
        stack.enter_context(init_empty_weights(include_buffers=True))
        stack.enter_context(meta_device_safe_creation_ops())
        try:
            module: PreTrainedModel = chosen.model_class._from_config(chosen.config, dtype=dtype)
        except ImportError as error:  # a tower from another package
            raise BuildError(source.id, architecture.one_line(error), "install what it needs") from error
        except Exception as error:  # any line of the model's constructor may stumble over the config
            problem = f"{chosen.model_class.__name__} raised {type(error).__name__}: {architecture.one_line(error)}"
            empty = [name for name, value in vars(chosen.config).items() if value is None and bound_of(name)]
            if "NoneType" in problem and empty:
                problem += f" (the config leaves {', '.join(empty)} empty)"
            if isinstance(error, KeyError) and (fields := _fields_of(error.args[0], source.config)):
                problem += f" (the value of {', '.join(fields)})"
            raise BuildError(source.id, problem, "correct the config") from error
    _onto_meta(module, dtype)
    _keep_as_loaded(module, dtype)
    module.eval()
    return module


def _fields_of(value: object, fields: Mapping[str, Any], path: str = "") -> list[str]:
    """Names of the config's fields with this text: what a constructor looked up and did not find."""
    found = []
    for name, own in fields.items():
        if isinstance(own, Mapping):
            found += _fields_of(value, own, f"{path}{name}.")
        elif isinstance(own, str) and own == value:
            found.append(path + name)
    return found


def _onto_meta(module: nn.Module, dtype: torch.dtype) -> None:
    """Move what no patched constructor made: `torch.normal` and the legacy `torch.FloatTensor` give CPU tensors."""
    moved: dict[torch.Tensor, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.device.type != "meta":
                empty = moved.get(parameter)
                if empty is None:
                    empty = nn.Parameter(
                        torch.empty_like(parameter, device="meta", dtype=dtype), parameter.requires_grad
                    )
                part._parameters[name] = moved[parameter] = empty


def _keep_as_loaded(module: PreTrainedModel, dtype: torch.dtype) -> None:
    """Apply the class's plan of parameters that a load keeps in fp32 (`_keep_in_fp32_modules`), as the loader would."""
    plan = module._get_dtype_plan(dtype)
    if not plan:
        return
    pattern, by_group, _ = build_glob_alternation(list(plan))
    for name, tensor in module.state_dict(keep_vars=True).items():  # a load fills these and no other buffers
        if (match := pattern.search(name)) and match.lastgroup:
            tensor.data = tensor.data.to(plan[by_group[match.lastgroup]])


def _from_factory(source: Source, factory: str, asked: str | None, inputs: Any) -> BuiltModel:
    path = Path(os.path.expanduser(source.id.rpartition(":")[0]))
    with quiet():
        module, own_inputs = run_factory(path, factory)
    if not all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):  # it named a device, or loaded
        module = _meta_copy(module, source.id)
    return _plain(module, source.id, source.text, source.config_sha256, asked, own_inputs if inputs is None else inputs)


def _plain(module: nn.Module, name: str, source: str, digest: str, asked: str | None, inputs: Any) -> BuiltModel:
    """The record's view of a module that is ours to change and lies on meta."""
    module.eval()
    named = None if inputs is None else named_inputs(module, inputs)
    if asked is not None:
        module.to(torch_dtype(asked))
        named = named and each_tensor(named, partial(_cast, dtype=torch_dtype(asked)))
    config = getattr(module, "config", None)
    config = config if isinstance(config, PreTrainedConfig) else None
    identity = ModelIdentity(
        id=name,
        class_name=type(module).__name__,
        source=source,
        config_sha256=digest,
        config={} if config is None else json.loads(config.to_json_string(use_diff=False)),
    )
    return BuiltModel(
        module=module, identity=identity, dtype=asked or _module_dtype(module), config=config, inputs=named
    )


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An input of reals in the dtype of the run; ids and masks as they are."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _meta_copy(module: nn.Module, name: str) -> nn.Module:
    """The same modules, ties and attributes with every tensor on meta; the weights are not copied on the way."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        held = [*part._parameters.values(), *part._buffers.values(), *vars(part).values()]
        for tensor in held:
            if isinstance(tensor, torch.Tensor) and is_lazy(tensor):
                raise BuildError(name, "it has a lazy module whose shapes are not known", "run it once before")
            if isinstance(tensor, nn.Parameter):
                empty = torch.empty_like(tensor, device="meta")
                memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            elif isinstance(tensor, torch.Tensor):
                memo[id(tensor)] = torch.empty_like(tensor, device="meta")
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # an attribute that cannot be copied: a lock, a generator, an open file
        problem = f"it cannot be copied: {type(error).__name__}: {architecture.one_line(error)}"
        raise BuildError(name, problem, "give a factory that builds it instead (file.py:factory)") from error


def _asked_dtype(dtype: str) -> str:
    name = _compute_dtype(dtype)
    if name is None:
        raise OptionError("--dtype", dtype, f"one of {', '.join(COMPUTE_DTYPES)}")
    return name


def _check_dtypes(source: Source) -> None:
    """Refuse a dtype that no module computes in; the config classes would stumble over it or take it as it is."""
    for name in ("dtype", "torch_dtype"):
        value = source.config.get(name)
        if value is not None and value != "auto" and _compute_dtype(str(value)) is None:
            raise ConfigError(source.id, name, value, f"one of {', '.join(COMPUTE_DTYPES)}")


def _config_dtype(config: PreTrainedConfig) -> str | None:
    """The short name of the dtype the config names, or its text part when the whole names none."""
    named = config.dtype if config.dtype is not None else architecture.text_part(config).dtype
    return None if named is None else _compute_dtype(named)


def _module_dtype(module: nn.Module) -> str:
    names = (_compute_dtype(tensor.dtype) for tensor in module.parameters())
    return next((name for name in names if name), "fp32")


def _compute_dtype(dtype: str | torch.dtype) -> str | None:
    """The short name of a dtype a module can compute in, given as such, as "bfloat16" or as its object; else None."""
    try:
        name = dtype_name(torch_dtype(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype)
    except KeyError:
        return None
    return name if name in COMPUTE_DTYPES else None


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the library's own remarks on a config off stderr: what matters of them is a note or an error here."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
