"""Bytes of weights, cache and activations of records made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.traces import HEADS, HIDDEN, INNER, KV_HEADS, VOCABULARY, WIDTH, Recording, llama, moe_ffn

from introspect.analyzers._products import products
from introspect.analyzers._structure import Structure
from introspect.analyzers._traffic import (
    activation_bytes,
    cache_traffic,
    expected_experts,
    peak_activation_bytes,
    weight_reads,
)
from introspect.graph import Graph

LAYER = HIDDEN * WIDTH * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * INNER + 2 * HIDDEN


def test_weights_are_read_once_and_a_lookup_reads_its_rows():
    reads = weight_reads(Graph(llama(batch=2, seq=3)))
    assert reads.expected == 2 * (2 * LAYER + HIDDEN + HIDDEN * VOCABULARY + 6 * HIDDEN)
    assert reads.floor == reads.ceiling == reads.expected


def test_a_lookup_reads_no_more_than_its_table():
    r = Recording(seq=50)
    r.lookup("embed.weight", 9, HIDDEN, 50)
    assert weight_reads(Graph(r.trace())).expected == 2 * 9 * HIDDEN


@pytest.mark.parametrize(("tokens", "floor", "ceiling"), [(1, 2, 2), (3, 2, 6), (9, 2, 8)])
def test_routed_experts(tokens, floor, ceiling):
    trace = llama(layers=1, seq=tokens, ffn=lambda layer: moe_ffn("layers.0.moe", inner=27))
    one = 2 * (HIDDEN * 54 + 27 * HIDDEN)
    reads = weight_reads(Graph(trace))
    rest = reads.floor - floor * one
    assert reads.ceiling == rest + ceiling * one
    assert reads.expected == rest + round(8 * (1 - (3 / 4) ** tokens) * one)


@given(experts=st.integers(1, 512), tokens=st.integers(1, 4096), data=st.data())
def test_expected_experts_lie_between_the_extremes(experts, tokens, data):
    top_k = data.draw(st.integers(1, experts))
    expected = expected_experts(experts, top_k, tokens)
    assert top_k - 1e-9 * experts <= expected <= min(experts, tokens * top_k) + 1e-9 * experts


def test_decode_reads_the_cache_and_writes_one_token():
    traffic = cache_traffic(Graph(llama(phase="decode", batch=3, seq=1, context=40)))
    token = 2 * 2 * KV_HEADS * WIDTH * 2  # layers, keys and values, bf16
    assert (traffic.read, traffic.written) == (3 * 40 * token, 3 * token)


def test_prefill_writes_what_it_is_given():
    traffic = cache_traffic(Graph(llama(seq=6)))
    assert (traffic.read, traffic.written) == (0, 6 * 2 * 2 * KV_HEADS * WIDTH * 2)


def test_a_sliding_cache_keeps_no_more_than_its_window():
    trace = llama(seq=6)
    held = tuple(replace(entry, shape_after=(1, KV_HEADS, 3, WIDTH)) for entry in trace.cache)
    assert cache_traffic(Graph(replace(trace, cache=held))).written == 3 * 2 * 2 * KV_HEADS * WIDTH * 2


def test_activations_of_products_once_each():
    r = Recording()
    r.linear(r.linear(r.tensor((6, 4)), "a", 9), "b", 5)
    found = products(Structure(Graph(r.trace())))
    assert activation_bytes(found) == 2 * 6 * (4 + 9 + 9 + 5)


def test_keys_and_values_are_no_activations():
    found = [p for p in products(Structure(Graph(llama(layers=1, seq=6)))) if p.module.endswith("attn")]
    assert activation_bytes(found) == 2 * 2 * 6 * HEADS * WIDTH  # queries and the result


def test_peak():
    # 6x4 alive with 6x9, then 6x9 with 6x5; inputs count while they are used
    r = Recording()
    x = r.op("silu", (r.tensor((6, 4)),), (6, 4))
    y = r.op("pad", (x,), (6, 9))
    r.op("slice_copy", (y,), (6, 5))
    assert peak_activation_bytes(r.trace()) == 2 * 6 * (9 + 5)


def test_a_skip_stays_alive():
    r = Recording()
    x = r.op("silu", (r.tensor((6, 4)),), (6, 4))
    y = r.op("pad", (x,), (6, 9))
    z = r.op("slice_copy", (y,), (6, 4))
    r.op("add", (x, z), (6, 4))
    assert peak_activation_bytes(r.trace()) == 2 * 6 * (4 + 9 + 4)
