"""Routing policies: which experts tokens go to when a router's choice has no value.

balanced: as even as whole rows allow. uniform: every token draws k distinct experts, all equally likely.
zipf: likewise with probability proportional to 1/rank, the skew that trained routers without balancing show.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """How tokens of all ranks choose among `experts` that lie in equal parts on `ep` ranks.

    `tp` neighbours share a batch and keep a slice of its tokens each; every such group has a batch of its own. Balanced
    choices go on from group to group; under a random policy every group's tokens choose as this one's do.
    """

    policy: str
    experts: int
    tp: int
    ep: int

    def choice(self, tokens: int, top_k: int, group: int, seed: int) -> torch.Tensor:
        """The experts each token of a group goes to, [tokens, top_k]."""
        with _disable_current_modes():
            if self.policy == "balanced":
                pairs = tokens * top_k
                return ((torch.arange(pairs) + group * pairs) % self.experts).view(tokens, top_k)
            return torch.cat(list(_draws(self.policy, tokens, top_k, self.experts, seed)))

    def received(self, own: torch.Tensor | None, tokens: int, top_k: int, rank: int) -> torch.Tensor:
        """Rows that each rank sends for each of `rank`'s experts, [ep, experts / ep]. `own`: this group's choice."""
        local = self.experts // self.ep
        counts = []
        for group in range(self.ep // self.tp):
            chosen = own if self.policy != "balanced" or own is None else self.choice(tokens, top_k, group, 0)
            assert chosen is not None
            slices = chosen.split(-(-tokens // self.tp))
            parts = [part.reshape(-1) for part in slices] + [chosen.new_empty(0)] * (self.tp - len(slices))
            counts += [torch.bincount(part, minlength=self.experts) for part in parts]
        return torch.stack(counts)[:, rank % self.ep * local :][:, :local]


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
