"""Parts of the cache, from records made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.traces import HIDDEN, VOCABULARY, Recording, latent_model, llama

from introspect.analyzers._step import Step
from introspect.records import CacheTensor

HEADS, KV_HEADS, WIDTH, CONTEXT = 4, 2, 8, 10


def one_layer(*, batch=1, readers=1, pairs=None):
    """One cached layer of 2 key heads that `readers` attention calls read, each for `pairs` pairs of a head."""
    r = Recording(phase="decode", batch=batch, seq=1, context=CONTEXT)
    x = r.lookup("embed.weight", VOCABULARY, HIDDEN, batch)
    shape = (batch, KV_HEADS, 1, WIDTH)
    k, v = (
        r.cached(r.linear(x, f"layers.0.attn.{name}", KV_HEADS * WIDTH), 0, name, shape) for name in ("keys", "values")
    )
    for layer in range(readers):
        q = r.linear(x, f"layers.{layer}.attn.q", HEADS * WIDTH)
        mixed = r.attention(
            q, k, v, heads=HEADS, kv_heads=KV_HEADS, width=WIDTH, module=f"layers.{layer}.attn", pairs=pairs
        )
        out = r.linear(mixed, f"layers.{layer}.attn.o", HIDDEN)
        x = r.op("add", (x, out), r.tensors[x].shape, module=f"layers.{layer}")
    r.linear(x, "head", VOCABULARY)
    return r.trace()


def parts(trace):
    return Step(trace).parts


def state(name, shape, layer=0):
    return CacheTensor(
        layer=layer, layer_class="Layer", name=name, dtype="fp32", shape_before=shape, shape_after=shape, storage=10**6
    )


@pytest.mark.parametrize("batch", [1, 3])
def test_figures_are_of_one_sequence(batch):
    (part,) = parts(one_layer(batch=batch))
    assert (part.kind, part.query_heads, part.kv_heads, part.group) == ("GQA", 4, 2, 2)
    assert (part.row_bits, part.row_elements, part.row_vectors) == (2 * 2 * 8 * 16, 2 * 2 * 8, 4)
    assert part.bytes_at(CONTEXT) == CONTEXT * 64
    assert part.flops_per_key == 2 * 4 * (8 + 8)
    assert part.flop_per_byte == 2


def test_a_second_reader_shares():
    own, shared = parts(one_layer(readers=2))
    assert (own.kind, own.layer) == ("GQA", (0,))
    assert (shared.kind, shared.layer) == ("shared", (1,))
    assert shared.bytes_at(CONTEXT) == 0
    assert shared.flop_per_byte == own.flop_per_byte


def test_attention_that_selects_keys_reads_no_more_of_them():
    (part,) = parts(one_layer(pairs=4))
    assert part.selected == 4
    assert [part.keys_read(context) for context in (2, 4, 1000)] == [2, 4, 4]
    (whole,) = parts(one_layer())
    assert whole.selected is None


def test_a_window_is_what_the_layer_class_says():
    trace = one_layer()
    tensors = tuple(
        replace(tensor, window=8, shape_before=(1, 2, 7, 8), shape_after=(1, 2, 7, 8)) for tensor in trace.cache
    )
    (part,) = parts(replace(trace, cache=tensors))
    assert (part.kind, part.window, part.row_bits) == ("sliding", 8, 512)
    assert [part.rows(context) for context in (3, 7, 8, 100)] == [3, 7, 7, 7]


def test_a_latent_is_one_head_for_all_queries():
    (part,) = parts(latent_model(phase="decode", seq=1, context=CONTEXT))
    rank, nope, rope, value = 27, 11, 5, 7
    assert (part.kind, part.kv_heads, part.k_dim, part.v_dim) == ("MLA", 1, nope + rope, value)
    assert part.row_elements == rank + rope
    assert part.flop_per_byte == pytest.approx(2 * 4 * (2 * rank + rope) / (2 * (rank + rope)))


@pytest.mark.parametrize(
    ("tensors", "kind"),
    [
        ([state("conv_states.0", (1, 32, 4))], "convolution"),
        ([state("conv_states.0", (1, 32, 4)), state("recurrent_states.0", (1, 32, 16))], "state"),
        ([state("recurrent_states.0", (1, 4, 8, 8))], "linear"),
    ],
)
def test_states_are_told_by_their_shapes(tensors, kind):
    trace = replace(llama(phase="decode", seq=1, context=CONTEXT), cache=tuple(tensors))
    (part,) = parts(trace)
    assert (part.kind, part.state_bytes) == (kind, sum(tensor.bytes_after for tensor in tensors))
    assert part.bytes_at(10**6) == part.state_bytes


def test_rows_for_several_tokens_are_compressed():
    trace = one_layer()
    extra = CacheTensor(
        layer=1,
        layer_class="Layer",
        name="compressed_kv",
        dtype="bf16",
        shape_before=(1, 2, 64),
        shape_after=(1, 3, 64),
        storage=10**6,
    )
    _, part = parts(replace(trace, cache=(*trace.cache, extra)))
    assert part.kind == "compressed"
    assert part.bytes_at(CONTEXT) == pytest.approx(2 * 64 * 2, abs=2)


def test_a_fixed_encoder_context_is_cross_attention():
    trace = one_layer()
    tensors = tuple(
        replace(tensor, name=f"cross.{tensor.name}", shape_before=tensor.shape_after) for tensor in trace.cache
    )
    (part,) = parts(replace(trace, cache=tensors))
    assert (part.kind, part.row_bits, part.state_bytes) == ("cross", 0, 11 * 64)


def test_keys_of_an_indexer_stand_apart():
    trace = one_layer()
    index = CacheTensor(
        layer=0,
        layer_class="Layer",
        name="indexer_keys",
        dtype="bf16",
        shape_before=(1, 1, 10, 16),
        shape_after=(1, 1, 11, 16),
        storage=10**6,
    )
    attention, own = parts(replace(trace, cache=(*trace.cache, index)))
    assert (attention.kind, own.kind) == ("GQA", "index")
    assert own.bytes_at(CONTEXT) == 10 * 16 * 2
