"""Which layers of a model are of the same kind, told from what a run recorded and never from names.

A stack is an outermost `nn.ModuleList`. The kind of a layer is: its parameters' names, the ops it ran in each of its
modules, the tensors it read that were made before the stack began (which mask, which rotary angles), how many query
heads share a key head, and whether experts outnumber those a token is sent to. Sizes are no part of a kind.
"""

from __future__ import annotations

import re
from collections import defaultdict

from torch import nn

from introspect.records import Op, Trace

Kind = tuple[object, ...]
Place = tuple[str, int]  # stack, layer

# Whether a view needs a copy, or a scalar a tensor, depends on sizes.
_BY_SIZE = ("layout", "copy", "cast", "factory", "scalar")
_NO_LAYER: Place = ("", -1)


def layer_kinds(model: nn.Module, trace: Trace) -> dict[str, tuple[Kind, ...]]:
    """The kind of every layer of every stack, by the stack's path; a layer that did not run is known by parameters."""
    stacks = _stacks(model)
    ran = _ops_by_layer(trace, stacks)
    kinds = {}
    for path, layers in stacks.items():
        shared = _made_before(trace, ran, path)
        kinds[path] = tuple(
            (_parameter_names(layer), *_behaviour(trace, ran[path, i], shared)) for i, layer in enumerate(layers)
        )
    return kinds


def _parameter_names(layer: nn.Module) -> frozenset[str]:
    return frozenset(_without_numbers(name) for name, _ in layer.named_parameters())


def _without_numbers(path: str) -> str:
    """A path whose list positions are masked: which entry of an inner list a layer uses is no part of its kind."""
    return re.sub(r"\b\d+\b", "*", path)


def _stacks(model: nn.Module) -> dict[str, nn.ModuleList]:
    found: dict[str, nn.ModuleList] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer in found):
            found[path] = module
    return found


def _ops_by_layer(trace: Trace, stacks: dict[str, nn.ModuleList]) -> dict[Place, list[tuple[int, str, Op]]]:
    """The ops each layer ran: position in the run, path of the module below the layer, op."""
    place: dict[str, tuple[Place, str]] = {}
    for path, layers in stacks.items():
        for i, layer in enumerate(layers):
            for below, _ in layer.named_modules():
                place[f"{path}.{i}.{below}".rstrip(".")] = ((path, i), below)
    ran: dict[Place, list[tuple[int, str, Op]]] = defaultdict(list)
    for position, (op, _) in enumerate(trace.walk()):
        where, below = place.get(op.module, (_NO_LAYER, ""))
        ran[where].append((position, below, op))
    return ran


def _made_before(trace: Trace, ran: dict[Place, list[tuple[int, str, Op]]], stack: str) -> dict[int, int]:
    """Storages that ops made before the stack's first op, numbered in the order in which its layers read them."""
    inside = sorted(entry[0] for place, entries in ran.items() if place[0] == stack for entry in entries)
    if not inside:
        return {}
    made = {
        trace.tensors[i].storage
        for position, _, op in ran[_NO_LAYER]
        if position < inside[0]
        for i in op.outputs
        if trace.tensors[i].role in ("activation", "index")
    }
    numbers: dict[int, int] = {}
    for place, entries in sorted(ran.items()):
        for _, _, op in entries if place[0] == stack else ():
            for i in op.inputs:
                tensor = trace.tensors[i]
                if tensor.storage in made and tensor.elements > 1:  # a single number is a layer's own counter
                    numbers.setdefault(tensor.storage, len(numbers))
    return numbers


def _behaviour(trace: Trace, entries: list[tuple[int, str, Op]], shared: dict[int, int]) -> Kind:
    ops: list[object] = []
    read: set[int] = set()
    for _, below, op in entries:
        read.update(shared[s] for i in op.inputs if (s := trace.tensors[i].storage) in shared)
        if op.kind in _BY_SIZE:
            continue
        ops.append((_without_numbers(below), op.name))
        if (call := op.attention) is not None:
            ops.append((call.query_heads // call.kv_heads, call.query_heads > 1, call.kv_heads > 1))
        if op.experts is not None:
            ops.append((op.experts.experts > op.experts.top_k, op.experts.top_k > 1))
    return tuple(ops), frozenset(read)
