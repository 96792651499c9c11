"""Latent attention three ways, side by side: what each costs for a token, and when absorption stops paying.

absorbed: the cache holds the latent and attention runs on it (_latent.py); expanded: keys and values of every head are
cached, each token expanded once; re-expanded: the latent is cached and all of it is expanded on every step, as
transformers does. In a prefill without cached tokens the last two execute the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from introspect.analyzers._latent import LatentAttention
from introspect.analyzers._roofline import smallest
from introspect.table import Table

UNITS = {
    "phase": "",
    "method": "",
    "flops_per_token": "FLOP",
    "cache_bytes_read_per_token": "B",
    "kv_bytes_per_token": "B",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentCosts:
    """All latent attention calls of a decode step; `element_bytes` of the cache."""

    calls: tuple[LatentAttention, ...]
    element_bytes: int

    def absorbed(self, queries: int, pairs: int) -> int:
        """FLOPs of `queries` new tokens and `pairs` (query, key) pairs, all layers."""
        return sum(call.absorbed_flops(queries, pairs) for call in self.calls)

    def expanded(self, tokens: int, pairs: int) -> int:
        """FLOPs with `tokens` latents expanded for these pairs."""
        return sum(
            2 * tokens * call.rank * _expanded_width(call) + 2 * pairs * _pair_width(call) for call in self.calls
        )

    @property
    def latent_bytes(self) -> int:
        """Cached bytes of one token as a latent with its rotary key."""
        return sum((call.rank + call.rope_width) * self.element_bytes for call in self.calls)

    @property
    def expanded_bytes(self) -> int:
        """Cached bytes of one token as keys and values of every head."""
        return sum(_pair_width(call) * self.element_bytes for call in self.calls)

    def loses_from(self, context: int) -> int | None:
        """The query length on `context` cached tokens from which absorbed costs more than re-expanded."""
        return smallest(
            lambda queries: (
                self.absorbed(queries, _pairs(queries, context))
                > self.expanded(context + queries, _pairs(queries, context))
            )
        )


def _expanded_width(call: LatentAttention) -> int:
    return call.heads * (call.nope_width + call.value_width)


def _pair_width(call: LatentAttention) -> int:
    return call.heads * (call.nope_width + call.rope_width + call.value_width)


def _pairs(queries: int, context: int) -> int:
    return queries * context + queries * (queries + 1) // 2


def latent_table(costs: LatentCosts, context: int) -> Table:
    """Decode at `context`, and a prefill of as many tokens, for each method."""
    decode, prefill = _pairs(1, context), _pairs(context, 0)
    latent, whole = costs.latent_bytes, costs.expanded_bytes
    figures: Iterable[tuple[str, str, float, int, int]] = (
        ("decode", "absorbed", costs.absorbed(1, decode), context * latent, latent),
        ("decode", "expanded", costs.expanded(1, decode), context * whole, whole),
        ("decode", "re-expanded", costs.expanded(context + 1, decode), context * latent, latent),
        ("prefill", "absorbed", costs.absorbed(context, prefill) / context, 0, latent),
        ("prefill", "expanded", costs.expanded(context, prefill) / context, 0, whole),
        ("prefill", "re-expanded", costs.expanded(context, prefill) / context, 0, latent),
    )
    return Table(units=UNITS, rows=tuple(dict(zip(UNITS, row, strict=True)) for row in figures))
