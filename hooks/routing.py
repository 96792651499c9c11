"""Routing policies: which experts tokens go to when a router's choice has no value.

balanced: as even as whole rows allow. uniform: every token draws k distinct experts, all equally likely.
zipf: likewise with probability proportional to 1/rank, the skew that trained routers without balancing show.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes

# Tokens that draw at a time: bounds the memory of a draw (16 Ki tokens x 256 experts in fp32 are 16 MiB).
BLOCK_TOKENS = 1 << 14


def rows_per_expert(policy: str, tokens: int, top_k: int, experts: int, seed: int) -> list[int]:
    """Rows of each of `experts` experts for `tokens` tokens that pick `top_k` different ones each."""
    if policy == "balanced":
        share, extra = divmod(tokens * top_k, experts)
        return [share + (expert < extra) for expert in range(experts)]
    with _disable_current_modes():
        counts = torch.zeros(experts, dtype=torch.int64)
        for picked in _draws(policy, tokens, top_k, experts, seed):
            counts += torch.bincount(picked.reshape(-1), minlength=experts)
        return [int(count) for count in counts]


def expert_choice(policy: str, tokens: int, top_k: int, experts: int, seed: int) -> torch.Tensor:
    """The experts each token goes to, [tokens, top_k]; counted per expert they are `rows_per_expert`."""
    with _disable_current_modes():
        if policy == "balanced":
            return (torch.arange(tokens * top_k) % experts).view(tokens, top_k)
        return torch.cat(list(_draws(policy, tokens, top_k, experts, seed)))


def _draws(policy: str, tokens: int, top_k: int, experts: int, seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = expert_weights(policy, experts, generator)
    for start in range(0, tokens, BLOCK_TOKENS):
        block = weights.expand(min(BLOCK_TOKENS, tokens - start), experts)
        yield torch.multinomial(block, top_k, generator=generator)


def expert_weights(policy: str, experts: int, generator: torch.Generator) -> torch.Tensor:
    """How likely each expert is to be drawn first, up to a factor; which one comes first in "zipf" is drawn too."""
    weights = torch.ones(experts) if policy == "uniform" else 1.0 / torch.arange(1, experts + 1)
    return weights[torch.randperm(experts, generator=generator)]
