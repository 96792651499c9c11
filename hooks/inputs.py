"""The inputs that a user gives with a module: keywords in a dict, positional arguments in a tuple or list, one tensor.

They are kept as one dict of forward's arguments by name, in forward's order; what a forward takes as `*args` keeps its
place under POSITIONAL. They also say which step they are (`step_shape`), since no `--seq` does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_map

from introspect.errors import OptionError
from introspect.hooks.session import Session
from introspect.hooks.step import ids_name
from introspect.records import RunShape

FORMS = "a dict of forward's arguments, a tuple or list of positional ones, or one tensor"
POSITIONAL = "*"
"""The key of the positional arguments of a forward that gives them no names."""
_ID_NAMES = ("ids", "idx", "tokens")  # how arguments that take token ids end
_BESIDE_NAMES = ("mask", "position")  # in the names of arguments that only go with others


def named_inputs(module: nn.Module, given: Any) -> dict[str, Any]:
    """The inputs by the names of forward's arguments. OptionError for another form, or what forward does not take."""
    args, keywords = _arguments(given)
    signature = inspect.signature(module.forward)
    try:
        bound = signature.bind(*args, **keywords)
    except TypeError as error:
        taken = ", ".join(map(str, (p.replace(annotation=p.empty) for p in signature.parameters.values())))
        found = ", ".join(keywords) if keywords else f"{len(args)} positional"
        raise OptionError("inputs", found, f"what {type(module).__name__}.forward({taken}) takes: {error}") from None
    unnamed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    if any(signature.parameters[name].kind in unnamed for name in bound.arguments):
        return {POSITIONAL: bound.args, **bound.kwargs}
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        named |= value if signature.parameters[name].kind == inspect.Parameter.VAR_KEYWORD else {name: value}
    return named


def _arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, torch.Tensor):
        return (given,), {}
    if isinstance(given, (tuple, list)):
        return tuple(given), {}
    if isinstance(given, Mapping) and all(isinstance(name, str) for name in given):
        return (), dict(given)
    raise OptionError("inputs", type(given).__name__, FORMS)


def refuse_without_ids(model: nn.Module, accepted: set[str]) -> None:
    """Raise OptionError for a module that was given no inputs and whose forward takes no token ids."""
    kinds = {parameter.kind for parameter in inspect.signature(model.forward).parameters.values()}
    if ids_name(accepted) not in accepted and inspect.Parameter.VAR_KEYWORD not in kinds:
        name = f"{type(model).__name__}.forward({', '.join(inspect.signature(model.forward).parameters)})"
        raise OptionError(
            "inputs",
            "none",
            f"those of {name}, which takes no {ids_name(accepted)} "
            "(introspect.trace(module, inputs), or a factory that returns both)",
        )


def run_on(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """What the module gives for inputs as `named_inputs` made them."""
    return model(*inputs.get(POSITIONAL, ()), **{name: value for name, value in inputs.items() if name != POSITIONAL})


def placed(session: Session, inputs: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Inputs on the model's device, those inside tuples, lists and dicts too; values are kept when that is meta."""

    def to_meta(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_meta else session.shadow.give(torch.empty_like(tensor, device="meta"), tensor)

    first = next((tensor for tensors in (model.parameters(), model.buffers()) for tensor in tensors), None)
    return each_tensor(inputs, to_meta) if first is not None and first.is_meta else dict(inputs)


def each_tensor(inputs: Mapping[str, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """The inputs with every tensor changed, the same one given twice to the same one: attention asks `key is value`."""
    changed: dict[int, torch.Tensor] = {}

    def once(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in changed:
            changed[id(leaf)] = change(leaf)
        return changed[id(leaf)]

    return {name: tree_map(once, value) for name, value in inputs.items()}


def step_shape(module: nn.Module, inputs: Mapping[str, Any]) -> tuple[int, int]:
    """(sequences, new tokens a sequence) of the step that these inputs are.

    Integer ids [B, S] as the first input, or under a name that ends as ids do, are B sequences of S tokens; a first
    input [B, S, D] of reals too, unless the module begins with a convolution, whose second dimension are channels. Any
    other first input is a batch [B, ...] of one each; a vector of reals or a number is alone.
    """
    tensors = [(name, t) for name, t in _named_tensors(inputs) if not any(word in name for word in _BESIDE_NAMES)]
    ids = [t for place, (name, t) in enumerate(tensors) if _is_ids(t) and (place == 0 or name.endswith(_ID_NAMES))]
    if ids:
        return ids[0].shape[0], ids[0].shape[1]
    if not tensors:
        return 1, 1
    first = tensors[0][1]
    layered = next((part for part in module.modules() if part._parameters), None)
    if first.dim() == 3 and first.is_floating_point() and not isinstance(layered, _ConvNd):
        return first.shape[0], first.shape[1]
    alone = first.dim() == 0 or (first.dim() == 1 and first.is_floating_point())
    return (1 if alone else first.shape[0]), 1


def given_run(run: RunShape, module: nn.Module, inputs: Mapping[str, Any]) -> RunShape:
    """The run that these inputs make of the one asked for: no cached tokens, and the batch and length they have."""
    batch, seq = step_shape(module, inputs)
    return run.with_(batch=batch, seq=seq, context=0)


def _is_ids(tensor: torch.Tensor) -> bool:
    whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    return whole and tensor.dim() == 2


def _named_tensors(inputs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in inputs.items():
        for one in value if name == POSITIONAL else (value,):
            if isinstance(one, torch.Tensor):
                yield name, one
