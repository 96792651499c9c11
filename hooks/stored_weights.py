"""The tensors a quantised checkpoint stores, parameter by parameter, in the model's names.

transformers' quantiser prepares the model on meta where it can run without weights (fp8, compressed-tensors): its
modules hold the very tensors that a load fills. Everything else follows from the settings (introspect.quant_schemes),
applied to each Linear under its name in the model and in the checkpoint; stacked experts are taken apart by
transformers' own conversions, since a checkpoint quantises each expert's Linear on its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert

from introspect.formats import Format, Matrix, Role, StoredTensor
from introspect.hooks import loader
from introspect.hooks.build import build
from introspect.hooks.dtypes import dtype_name, torch_dtype
from introspect.hooks.quantised import prepare, settings
from introspect.native_record import NativeFormat, StoredParameter
from introspect.quant_schemes import Schemes, UnknownScheme, method_of, schemes
from introspect.sources import Source

BY_MODULES = ("fp8", "compressed-tensors")
"""Methods whose quantiser puts modules with the stored tensors into a meta model."""


@dataclass(frozen=True, slots=True)
class Dense:
    """A matrix as the checkpoint would hold it unquantised: its parameter and the names its module goes by."""

    parameter: str
    names: tuple[str, ...]
    matrix: Matrix
    in_layer: bool
    stacked: bool


def stored_weights(source: Source) -> NativeFormat:
    """What the checkpoint stores. Raises what hooks.build raises."""
    built = build(source)
    model, found = built.module, settings(source.config)
    method = method_of(found or {})
    if not isinstance(model, PreTrainedModel):
        return NativeFormat(method=method, route="", problem="the model is not of transformers")
    try:
        rules = schemes(found, source.hf_quant_config, get_keys_to_not_convert(model), built.dtype)
    except UnknownScheme as problem:
        return NativeFormat(method=method, route="", problem=str(problem))
    used: dict[int, Format] = {}
    by_rules = {one.parameter: one for one in _by_rules(model, rules, used)}
    unused = tuple(label for label, format in rules.formats.items() if id(format) not in used)
    if not by_rules:
        return NativeFormat(method=rules.method, route="", problem=f"no module of the model fits {'; '.join(unused)}")
    route = "settings applied to the model's Linears"
    if method in BY_MODULES and source.hf_quant_config is None:
        logical = _state(model)
        prepared = prepare(model, source.config, torch_dtype(built.dtype))
        if prepared is not None and prepared.quantiser is not None:
            route = "modules of transformers' quantiser on meta"
            stacked = {path: one for path, one in by_rules.items() if len(logical[path][0]) > 2}
            changed = {one.parameter: one for one in _by_modules(logical, _state(model), by_rules)}
            by_rules = stacked | changed  # the quantiser of compressed-tensors knows no stacked experts
        elif prepared is not None:
            route += f" ({prepared.reason})"
    return NativeFormat(
        method=rules.method,
        route=route,
        parameters=tuple(by_rules.values()),
        kv_dtype=rules.kv_dtype,
        notes=tuple(f"no module of the model fits {label}" for label in unused),
    )


# --- by the settings ----------------------------------------------------------------------------------------------


def _by_rules(model: PreTrainedModel, rules: Schemes, formats: dict[int, Format]) -> Iterator[StoredParameter]:
    """The parameters that the settings quantise; `formats` is filled with those that are used, by identity."""
    counts: defaultdict[str, defaultdict[tuple[int, int, int], int]] = defaultdict(lambda: defaultdict(int))
    for dense in _dense(model):
        if (rules.only_in_layers and not dense.in_layer) or (rules.only_experts and not dense.stacked):
            continue
        format = rules.choose(dense.names)
        if format is not None:
            formats[id(format)] = format
            counts[dense.parameter][id(format), dense.matrix.rows, dense.matrix.columns] += dense.matrix.count
    for parameter, equal in counts.items():
        tensors = [
            tensor
            for (format_id, rows, columns), count in equal.items()
            for tensor in formats[format_id].tensors(Matrix(rows, columns, count))
        ]
        compute = formats[next(iter(equal))[0]].compute
        yield StoredParameter(parameter=parameter, tensors=tuple(tensors), compute=compute)


def _dense(model: PreTrainedModel) -> Iterator[Dense]:
    """Every Linear's weight, and every matrix of stacked experts."""
    stacked: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            rows, columns = module.weight.shape if isinstance(module, nn.Linear) else reversed(module.weight.shape)
            yield Dense(f"{path}.weight", _aliases(path), Matrix(rows, columns), _in_layer(path), stacked=False)
        else:
            own = module.named_parameters(recurse=False)
            stacked |= {f"{path}.{name}": module for name, tensor in own if tensor.dim() == 3}
    yield from _stacked(model, stacked)


def _stacked(model: PreTrainedModel, owners: dict[str, nn.Module]) -> Iterator[Dense]:
    """Experts as the checkpoint names them; where it stacks them too, as they are."""
    state = model.state_dict()
    reverted = revert_weight_conversion(model, state)
    taken: set[str] = set()
    for name, landing in loader.land(reverted, model, state, loader.conversions(model, None)).items():
        if landing.parameter in owners and landing.converter is not None and reverted[name].dim() == 2:
            taken.add(landing.parameter)
            rows, columns = reverted[name].shape
            module = name.removesuffix(".weight")
            yield Dense(landing.parameter, _aliases(module), Matrix(rows, columns), _in_layer(module), stacked=True)
    for path, owner in owners.items():
        if path not in taken and path.rpartition(".")[2] != "weight":  # a convolution's weight is no stack
            count, rows, columns = state[path].shape
            if getattr(owner, "is_transposed", False):
                rows, columns = columns, rows
            yield Dense(path, _aliases(path), Matrix(rows, columns, count), _in_layer(path), stacked=True)


def _aliases(path: str) -> tuple[str, ...]:
    """The names a module goes by: checkpoints put the prefix of a text model in either order, or leave it out."""
    found = [path]
    for own, other in (
        ("model.language_model.", "language_model.model."),
        ("language_model.model.", "model.language_model."),
    ):
        if path.startswith(own):
            found.append(other + path.removeprefix(own))
    if path == "lm_head":
        found.append("language_model.lm_head")
    return (*found, *(name.removeprefix("model.") for name in found if name.startswith("model.")))


def _in_layer(path: str) -> bool:
    return any(part.isdigit() for part in path.split("."))


# --- by the quantiser's modules -----------------------------------------------------------------------------------


def _state(model: nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in model.state_dict().items()}


def _by_modules(
    logical: dict[str, tuple[tuple[int, ...], torch.dtype]],
    prepared: dict[str, tuple[tuple[int, ...], torch.dtype]],
    by_rules: dict[str, StoredParameter],
) -> Iterator[StoredParameter]:
    """Parameters that the quantiser changed, with the tensors that now stand for each of them."""
    changed = [name for name, tensor in logical.items() if prepared.get(name) != tensor]
    of_module: defaultdict[str, list[str]] = defaultdict(list)
    for name in changed:
        of_module[name.rpartition(".")[0]].append(name)
    tensors: defaultdict[str, list[StoredTensor]] = defaultdict(list)
    for name, (shape, dtype) in prepared.items():
        module, _, leaf = name.rpartition(".")
        candidates = of_module.get(module, [])
        if logical.get(name) == (shape, dtype) or not candidates:
            continue
        owner = next((c for c in candidates if leaf.startswith(c.rpartition(".")[2])), candidates[0])
        tensors[owner].append(StoredTensor(_role(leaf), shape, dtype_name(dtype)))
    for parameter, stored in tensors.items():
        rule = by_rules.get(parameter)
        if rule is not None:  # compressed-tensors packs zero points like weights, but not in its shortcut for meta
            stored = [tensor for tensor in stored if tensor.role != "zero"]
            stored += [tensor for tensor in rule.tensors if tensor.role == "zero"]
        yield StoredParameter(
            parameter=parameter, tensors=tuple(stored), compute=None if rule is None else rule.compute
        )


def _role(leaf: str) -> Role:
    """What a tensor of a quantised module is for, by the libraries' names."""
    if "zero_point" in leaf:
        return "zero"
    if "g_idx" in leaf:
        return "index"
    if leaf.endswith(("_shape", "_global_scale")) or leaf.startswith("input_"):
        return "extra"
    return "scale" if "scale" in leaf else "packed"
