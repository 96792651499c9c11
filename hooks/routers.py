"""Router scores drawn from the routing policy, so that the model's own code chooses the experts.

A router multiplies a token by one row for each expert. What it then does with the scores (softmax or sigmoid, a
correction, groups of which some are kept, top-k) is the model's own, and on meta the scores have no value. Under a
random policy they get one: independent Gumbel noise, plus the logarithm of each expert's probability. The k largest
are then k different experts drawn with these probabilities (Gumbel-max trick).

Found by structure: beside a module that holds a matrix for each of E experts, a matrix of E rows is a router's and a
vector of E numbers its correction, taken as zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from introspect.hooks.routing import expert_weights
from introspect.hooks.shadow import Shadow
from introspect.records import RunShape


@dataclass(frozen=True, slots=True)
class Router:
    """One router: its matrix [E, d] and the vectors [E] that correct its scores."""

    weight: torch.Tensor
    corrections: tuple[torch.Tensor, ...]


def routers(model: nn.Module) -> Iterator[Router]:
    """The routers of a module tree, in definition order."""
    for parent in model.modules():
        for held in parent.children():
            count = _experts(held)
            if count < 2:
                continue
            inside = {id(tensor) for tensor in (*held.parameters(), *held.buffers())}
            tensors = [t for t in (*parent.parameters(), *parent.buffers()) if id(t) not in inside]
            beside = [t for t in tensors if t.shape[:1] == (count,)]
            corrections = tuple(t for t in beside if t.dim() == 1)
            yield from (Router(t, corrections) for t in beside if t.dim() == 2)


def _experts(module: nn.Module) -> int:
    """Experts of a module that itself holds a matrix for each, whole or sharded; 0 for any other."""
    stacks = [p.shape[0] for p in module.parameters(recurse=False) if p.dim() == 3]
    return stacks[0] if stacks else 0


def draw_scores(model: nn.Module, shadow: Shadow, run: RunShape) -> None:
    """Give every router of `model` scores under the run's policy, unless it is "balanced"; each layer draws its own."""
    if run.routing == "balanced":
        return
    for layer, router in enumerate(routers(model)):
        for tensor in router.corrections:
            if tensor.device.type == "meta":
                shadow.give(tensor, torch.zeros(tensor.shape, dtype=tensor.dtype))
        if router.weight.device.type == "meta":
            shadow.give_products(router.weight, partial(_scores, run.routing, run.seed + layer))


def _scores(policy: str, seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Scores [.., E] of as many tokens as `shape` has rows."""
    generator = torch.Generator().manual_seed(seed)
    weights = expert_weights(policy, shape[-1], generator)
    noise = torch.empty(shape).exponential_(generator=generator).log_().neg_()  # -log of an exponential is Gumbel
    return noise.add_(weights.log_()).to(dtype)
