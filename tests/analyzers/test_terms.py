"""Solving for coefficients gives back the coefficients."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from introspect.analyzers._terms import Points, decode_terms, prefill_terms

numbers = st.integers(0, 10**15)


@given(numbers, numbers, numbers)
def test_decode(constant, per_sequence, per_token):
    terms = decode_terms(
        lambda batch, context: constant + batch * (per_sequence + per_token * context),
        Points(near=100, far=1000, farther=3000),
    )
    assert (terms["constant"], terms["per_sequence"], terms["per_cached_token"]) == (constant, per_sequence, per_token)


@given(st.integers(1, 500))
def test_decode_beyond_a_window_of_any_size(window):
    terms = decode_terms(
        lambda batch, context: batch * (7 * context + 5 * min(context, window)),
        Points(near=100, far=1000, farther=3000),
    )
    assert (terms["constant"], terms["per_sequence"], terms["per_cached_token"]) == (0, 5 * window, 7)


@given(numbers, numbers, numbers, st.sampled_from([(1, 2, 3), (8192, 16384, 32768), (5, 7, 100)]))
def test_prefill(per_sequence, linear, square, lengths):
    terms = prefill_terms(lambda s: per_sequence + linear * s + square * s * s, lengths)
    found = (terms["per_sequence"], terms["per_prompt_token"], terms["per_prompt_token_squared"])
    assert found == (per_sequence, linear, square)


def test_half_coefficients_stay_exact():
    terms = prefill_terms(lambda s: s * (s + 1) // 2, (2, 4, 8))
    assert (terms["per_sequence"], terms["per_prompt_token"], terms["per_prompt_token_squared"]) == (0, 0.5, 0.5)
