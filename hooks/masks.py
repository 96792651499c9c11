"""How many (query, key) pairs a mask lets through, counted from transformers' own mask functions.

A mask function says for index tensors (batch, head, query, key) whether the key is visible. Small masks are evaluated
whole. Large ones never are (131072 x 131072 is 16 GiB): in a row the visible keys form one interval, whose ends two
binary searches find; sample rows are then checked in full, and a mask that is not of that form is counted in blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

WHOLE_CELLS = 1 << 20  # masks up to this many cells are evaluated whole (about a millisecond)
SAMPLE_CELLS = 1 << 20  # cells of the rows that are checked in full
BLOCK_CELLS = 1 << 24  # cells evaluated at a time when a mask is no interval per row


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskFacts:
    """Pairs of all sequences counted, of one head; the largest number of keys one query sees; and, where it was
    counted row by row, the keys each query of one sequence sees [S], out of how many."""

    pairs: int
    widest: int
    rows: torch.Tensor | None = None
    keys: int | None = None


def count_pairs(
    evaluate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], q_length: int, kv_length: int
) -> MaskFacts:
    """Count the visible pairs. `evaluate(q, kv)` takes index tensors that broadcast and returns booleans."""
    q, kv = torch.arange(q_length), torch.arange(kv_length)
    if q_length * kv_length <= WHOLE_CELLS:
        rows = _whole(evaluate, q, kv).sum(dim=1)
    else:
        by_interval = _by_interval(evaluate, q, kv_length)
        rows = _by_blocks(evaluate, q, kv) if by_interval is None else by_interval
    return MaskFacts(pairs=int(rows.sum()), widest=int(rows.max()) if q_length else 0, rows=rows, keys=kv_length)


def _whole(evaluate: Callable[..., torch.Tensor], q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return evaluate(q[:, None], kv[None, :]).expand(len(q), len(kv))


def _by_blocks(evaluate: Callable[..., torch.Tensor], q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    step = max(1, BLOCK_CELLS // len(kv))
    return torch.cat([_whole(evaluate, block, kv).sum(dim=1) for block in q.split(step)])


def _by_interval(evaluate: Callable[..., torch.Tensor], q: torch.Tensor, kv_length: int) -> torch.Tensor | None:
    """Visible keys per row if every row is one interval around a key that is easy to find, else None."""
    seed = _visible_key(evaluate, q, kv_length)
    if seed is None:
        return None
    first = _edge(evaluate, q, seed, torch.zeros_like(seed), towards_first=True)
    last = _edge(evaluate, q, seed, torch.full_like(seed, kv_length - 1), towards_first=False)
    sample = torch.linspace(0, len(q) - 1, max(2, min(len(q), SAMPLE_CELLS // kv_length))).long().unique()
    kv = torch.arange(kv_length)
    expected = (kv[None, :] >= first[sample][:, None]) & (kv[None, :] <= last[sample][:, None])
    if not torch.equal(_whole(evaluate, q[sample], kv), expected):
        return None
    return last - first + 1


def _visible_key(evaluate: Callable[..., torch.Tensor], q: torch.Tensor, kv_length: int) -> torch.Tensor | None:
    """One visible key per row (the diagonal that ends at the last key, the first, the last); None if a row has none."""
    diagonal = (q + (kv_length - len(q))).clamp(0, kv_length - 1)
    seed = torch.full_like(q, -1)
    for candidate in (diagonal, torch.zeros_like(q), torch.full_like(q, kv_length - 1)):
        visible = evaluate(q, candidate).expand(len(q))
        seed = torch.where((seed < 0) & visible, candidate, seed)
    return None if bool((seed < 0).any()) else seed


def _edge(
    evaluate: Callable[..., torch.Tensor],
    q: torch.Tensor,
    inside: torch.Tensor,
    limit: torch.Tensor,
    *,
    towards_first: bool,
) -> torch.Tensor:
    """The outermost visible key between `inside` (visible) and `limit`, by bisection in every row at once."""
    reached = evaluate(q, limit).expand(len(q))
    outside = limit
    while bool(((inside - outside).abs() > 1).any()):
        middle = (inside + outside) // 2
        visible = evaluate(q, middle).expand(len(q))
        inside, outside = torch.where(visible, middle, inside), torch.where(visible, outside, middle)
    return torch.where(reached, limit, inside)
