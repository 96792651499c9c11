"""Routing policies: how many rows each expert gets when a router's choice has no value.

balanced: as even as whole rows allow. uniform: every token draws k distinct experts, all equally likely.
zipf: likewise with probability proportional to 1/rank, the skew that trained routers without balancing show.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _disable_current_modes

# Rows of a random draw that are sampled one by one; more tokens draw in blocks of this many to bound memory.
BLOCK_TOKENS = 1 << 14


def rows_per_expert(policy: str, tokens: int, top_k: int, experts: int, seed: int) -> list[int]:
    """Rows of each of `experts` experts for `tokens` tokens that pick `top_k` different ones each."""
    if policy == "balanced":
        share, extra = divmod(tokens * top_k, experts)
        return [share + (expert < extra) for expert in range(experts)]
    with _disable_current_modes():
        generator = torch.Generator().manual_seed(seed)
        weights = torch.ones(experts) if policy == "uniform" else 1.0 / torch.arange(1, experts + 1)
        weights = weights[torch.randperm(experts, generator=generator)]
        counts = torch.zeros(experts, dtype=torch.int64)
        for start in range(0, tokens, BLOCK_TOKENS):
            block = weights.expand(min(BLOCK_TOKENS, tokens - start), experts)
            picked = torch.multinomial(block, top_k, generator=generator)
            counts += torch.bincount(picked.reshape(-1), minlength=experts)
        return [int(count) for count in counts]
