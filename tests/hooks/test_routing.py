from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from introspect.hooks.routing import rows_per_expert

POLICIES = ("balanced", "uniform", "zipf")


@given(policy=st.sampled_from(POLICIES), tokens=st.integers(1, 200), experts=st.integers(2, 32), seed=st.integers(0, 9))
def test_every_token_picks_k_different_experts(policy, tokens, experts, seed):
    top_k = min(3, experts)
    rows = rows_per_expert(policy, tokens, top_k, experts, seed)

    assert len(rows) == experts
    assert sum(rows) == tokens * top_k
    assert max(rows) <= tokens if policy != "balanced" else max(rows) - min(rows) <= 1


def test_seeds_give_the_same_draw_again_and_another_with_another_seed():
    assert rows_per_expert("uniform", 64, 8, 256, 1) == rows_per_expert("uniform", 64, 8, 256, 1)
    assert rows_per_expert("uniform", 64, 8, 256, 1) != rows_per_expert("uniform", 64, 8, 256, 2)


@pytest.mark.parametrize(("tokens", "expected"), [(32, 163.3), (64, 222.4)])
def test_uniform_routing_reaches_the_expected_number_of_experts(tokens, expected):
    # E (1 - (1 - k/E)^T): DeepSeek-V3's 256 experts, 8 a token
    draws = [sum(1 for rows in rows_per_expert("uniform", tokens, 8, 256, seed) if rows) for seed in range(200)]

    assert sum(draws) / len(draws) == pytest.approx(expected, rel=0.01)


def test_zipf_is_more_skewed_than_uniform():
    assert max(rows_per_expert("zipf", 4096, 2, 64, 0)) > 3 * max(rows_per_expert("uniform", 4096, 2, 64, 0))
