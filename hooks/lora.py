"""Low-rank adapters on a model for the time of one run: y + B(A(x)) for every Linear that a pattern names.

The model's own parameters are frozen meanwhile, so a training step computes what tuning an adapter computes: no weight
gradient of the base, and only the activations that the adapters and the gradients of activations need. Adapters take
the matrix's dtype; PEFT makes the same pair of matrices, in fp32 unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from introspect.records import RunShape

DOWN, UP = "lora_A", "lora_B"


@contextmanager
def adapted(model: nn.Module, run: RunShape) -> Iterator[None]:
    """Freeze `model` and put adapters of rank `run.lora_rank` on it; nothing is changed when that is 0."""
    if not run.lora_rank:
        yield
        return
    trained = {parameter: parameter.requires_grad for parameter in model.parameters()}
    found = [(path, module) for path, module in model.named_modules() if _is_target(path, module, run.lora_targets)]
    handles = []
    try:
        model.requires_grad_(False)
        for path, module in found:
            _attach(module, run.lora_rank)
            handles.append(module.register_forward_hook(partial(_add, path)))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for _, module in found:
            for name in (DOWN, UP):
                module._modules.pop(name, None)
        for parameter, value in trained.items():
            parameter.requires_grad_(value)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is one that adapters and quantisers know: a Linear, or GPT-2's Conv1D."""
    return isinstance(module, (nn.Linear, Conv1D))


def _is_target(path: str, module: nn.Module, patterns: tuple[str, ...]) -> bool:
    return is_linear(module) and any(fnmatchcase(path, pattern) for pattern in patterns)


def _attach(module: nn.Module, rank: int) -> None:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    outputs, inputs = weight.shape if isinstance(module, nn.Linear) else reversed(weight.shape)
    for name, taken, given in ((DOWN, inputs, rank), (UP, rank, outputs)):
        module.add_module(name, nn.Linear(taken, given, bias=False, device=weight.device, dtype=weight.dtype))


def _add(path: str, module: Any, args: tuple[torch.Tensor, ...], output: Any) -> torch.Tensor:
    """Add the adapter's product. TypeError for a subclass that returns something else (a router, a grouped Linear)."""
    change: torch.Tensor = module.lora_B(module.lora_A(args[0]))
    if not isinstance(output, torch.Tensor) or output.shape != change.shape:
        name = type(module).__name__
        raise TypeError(f"{name} at {path} is a Linear by class but returns no product with its whole matrix")
    return output + change
