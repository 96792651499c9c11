"""Limited attention: closed forms against counting, and what they change in a step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.traces import HEADS, WIDTH, llama

from introspect.analyzers._attention_pattern import Pattern
from introspect.analyzers._step import Step

patterns = st.builds(Pattern, window=st.integers(1, 50), sinks=st.integers(0, 60)) | st.builds(
    Pattern, chunk=st.integers(1, 50)
)


@given(patterns, st.integers(0, 200))
def test_pairs_are_the_keys_of_every_position(pattern, length):
    assert pattern.pairs(length) == sum(pattern.keys(position) for position in range(length))


@given(patterns, st.integers(0, 200))
def test_no_query_sees_more_than_there_is_or_than_is_kept(pattern, position):
    assert 1 <= pattern.keys(position) <= position + 1
    assert pattern.keys(position) <= pattern.rows(position) + 1


def test_a_wide_window_changes_nothing():
    step = Step(llama(seq=6))
    assert Pattern(window=6).limit(step.engine, step.trace.run) == step.engine


def test_a_window_of_two_with_a_sink_by_hand():
    pattern = Pattern(window=2, sinks=1)
    assert [pattern.keys(position) for position in range(5)] == [1, 2, 3, 3, 3]
    step = Step(llama(seq=5))
    limited = pattern.limit(step.engine, step.trace.run)
    attention = sum(product.flops for product in limited if product.attention is not None)
    assert attention == 2 * 2 * 12 * 2 * HEADS * WIDTH  # 2 layers, 2 products, 12 pairs


def test_decode_reads_only_the_visible_rows():
    step = Step(llama(phase="decode", seq=1, context=99))
    limited = Pattern(window=10).limit(step.engine, step.trace.run)
    for before, after in zip(step.engine, limited, strict=True):
        if before.attention is not None:
            assert (after.flops, after.rhs_bytes) == (before.flops // 10, before.rhs_bytes // 10)


def test_layers_with_a_pattern_of_their_own_keep_it():
    step = Step(llama(seq=6))
    narrow = [
        product if product.attention is None else replace_pairs(product, product.attention.visible_pairs - 1)
        for product in step.engine
    ]
    assert Pattern(window=1).limit(narrow, step.trace.run) == narrow


def replace_pairs(product, pairs):
    from dataclasses import replace

    return replace(product, attention=replace(product.attention, visible_pairs=pairs))
