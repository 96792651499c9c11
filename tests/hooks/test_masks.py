from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from introspect.hooks import masks
from introspect.hooks.masks import count_pairs

CAUSAL, WINDOW, CHUNK, HOLES = "causal", "window", "chunk", "holes"


def mask(kind: str, q: torch.Tensor, kv: torch.Tensor, offset: int, size: int) -> torch.Tensor:
    q = q + offset
    causal = kv <= q
    if kind == WINDOW:
        return causal & (kv > q - size)
    if kind == CHUNK:
        return causal & (kv // size == q // size)
    if kind == HOLES:
        return causal & (kv % 3 != 1)
    return causal


@given(
    kind=st.sampled_from([CAUSAL, WINDOW, CHUNK]),
    q_length=st.integers(1, 60),
    context=st.integers(0, 60),
    size=st.integers(1, 20),
)
@settings(max_examples=150)
def test_bisection_counts_what_the_whole_mask_shows(kind, q_length, context, size):
    kv_length = q_length + context

    def evaluate(q, kv):
        return mask(kind, q, kv, context, size)

    rows = masks._by_interval(evaluate, torch.arange(q_length), kv_length)
    whole = evaluate(torch.arange(q_length)[:, None], torch.arange(kv_length)[None, :]).sum(1)

    assert rows is not None
    assert torch.equal(rows, whole)


def test_a_mask_with_holes_is_counted_in_blocks(monkeypatch):
    monkeypatch.setattr(masks, "WHOLE_CELLS", 0)
    monkeypatch.setattr(masks, "BLOCK_CELLS", 500)

    facts = count_pairs(lambda q, kv: mask(HOLES, q, kv, 0, 0), 50, 50)

    assert facts.pairs == sum(sum(1 for k in range(q + 1) if k % 3 != 1) for q in range(50))


def test_a_long_causal_window_is_counted_exactly():
    facts = count_pairs(lambda q, kv: mask(WINDOW, q, kv, 0, 4096), 16384, 16384)

    # 4096 rows that grow, then 12288 rows of 4096: 8,390,656 + 50,331,648
    assert (facts.pairs, facts.widest) == (58_722_304, 4096)


@pytest.mark.parametrize(("q_length", "kv_length", "expected"), [(1, 9, 9), (4, 9, 6 + 7 + 8 + 9)])
def test_queries_are_the_last_positions(q_length, kv_length, expected):
    facts = count_pairs(lambda q, kv: mask(CAUSAL, q, kv, kv_length - q_length, 0), q_length, kv_length)

    assert facts.pairs == expected
    assert facts.keys == kv_length
