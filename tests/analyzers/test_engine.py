"""What an engine runs instead of what was recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.traces import (
    HEADS,
    HIDDEN,
    LATENT,
    VOCABULARY,
    WIDTH,
    Recording,
    latent_model,
    llama,
    llama_layer,
    moe_ffn,
)

from introspect.analyzers._engine import engine_products
from introspect.analyzers._latent import latent_attention
from introspect.analyzers._products import products
from introspect.analyzers._structure import Structure
from introspect.graph import Graph
from introspect.records import ExpertCall

RANK, NOPE, ROPE, VALUE = LATENT.values()


def served(trace):
    structure = Structure(Graph(trace))
    executed = products(structure)
    return executed, engine_products(structure, executed)


def flops(found, module):
    return sum(p.flops for p in found if p.module == module)


def test_masked_attention_and_last_logits():
    executed, engine = served(llama(batch=2, seq=6))
    assert flops(engine, "layers.0.attn") == 2 * (2 * (2 * 21) * HEADS * WIDTH)
    assert flops(executed, "head") == 2 * 12 * HIDDEN * VOCABULARY
    assert flops(engine, "head") == 2 * 2 * HIDDEN * VOCABULARY  # one position a sequence
    (head,) = (p for p in engine if p.module == "head")
    assert (head.m, head.lhs_bytes, head.out_bytes) == (2, 2 * 2 * HIDDEN, 2 * 2 * VOCABULARY)
    assert flops(engine, "layers.0.ffn.up") == flops(executed, "layers.0.ffn.up")


def test_an_encoder_keeps_all_positions():
    r = Recording(seq=6)
    x = r.lookup("embed.weight", VOCABULARY, HIDDEN, 6)
    mixed = r.attention(x, x, x, heads=4, kv_heads=4, width=8, module="layers.0", pairs=36)
    x = r.op("add", (x, r.linear(mixed, "layers.0.o", HIDDEN)), r.tensors[x].shape, module="layers.0")
    r.linear(x, "head", VOCABULARY)
    _, engine = served(r.trace())
    assert flops(engine, "head") == 2 * 6 * HIDDEN * VOCABULARY


def test_latent_attention_is_found_and_its_widths_read_off():
    (latent,) = latent_attention(Structure(Graph(latent_model(phase="decode", seq=1, context=40))))
    assert (latent.heads, latent.rank) == (HEADS, RANK)
    assert (latent.nope_width, latent.rope_width, latent.value_width) == (NOPE, ROPE, VALUE)


def test_grouped_query_attention_is_not_latent():
    assert latent_attention(Structure(Graph(llama(phase="decode", seq=1, context=40)))) == []


def test_decode_absorbs():
    # 1 query, 41 keys, 4 heads, rank 27, widths 11 + 5 and 7
    executed, engine = served(latent_model(phase="decode", seq=1, context=40))
    assert flops(executed, "layers.0.attn.kv_b") == 2 * 41 * 27 * 4 * (11 + 7)
    halves = [p for p in engine if p.module == "layers.0.attn.kv_b"]
    assert [(p.batch, p.m, p.k, p.n) for p in halves] == [(4, 1, 11, 27), (4, 1, 27, 7)]
    assert sum(p.flops for p in halves) == 2 * 27 * 4 * (11 + 7)
    assert sum(size for p in halves for _, size in p.weights) == 27 * 4 * (11 + 7)
    scores, context = (p for p in engine if p.module == "layers.0.attn")
    assert (scores.k, scores.n, scores.flops) == (27 + 5, 41, 2 * 41 * 4 * 32)
    assert (context.k, context.n, context.flops) == (41, 27, 2 * 41 * 4 * 27)
    assert scores.attention.kv_heads == 1
    assert scores.rhs_bytes == 2 * 41 * 32  # the latent, once for both products
    assert context.rhs_bytes == 0


def test_prefill_stays_expanded():
    executed, engine = served(latent_model(seq=40))
    assert flops(engine, "layers.0.attn.kv_b") == flops(executed, "layers.0.attn.kv_b")


@pytest.mark.parametrize(
    ("seq", "context", "selected", "pairs"),
    [
        (6, 0, 4, 1 + 2 + 3 + 4 + 4 + 4),  # the first queries see fewer keys than are selected
        (1, 40, 4, 4),
        (2, 40, 4, 8),
        (3, 0, 8, 6),
    ],
)
def test_selected_keys(seq, context, selected, pairs):
    phase = "decode" if seq == 1 else "prefill"
    r = Recording(phase=phase, seq=seq, context=context)
    x = r.lookup("embed.weight", VOCABULARY, HIDDEN, seq)
    keys = context + seq
    held = (r.tensor((1, 1, context, HIDDEN), role="cache"),) if context else ()
    whole = r.tensor((1, 1, keys, HIDDEN), role="cache")
    r.op("cat", (*held, r.linear(x, "layers.0.index", HIDDEN)), (), kind="cache_write", module="layers.0", out=whole)
    scores = r.op("relu", (whole,), (1, seq, keys), kind="activation", module="layers.0")
    r.op("topk", (scores,), (1, seq, min(selected, keys)), kind="topk", module="layers.0")
    llama_layer(r, x, 0)
    _, engine = served(r.trace())
    attention = [p for p in engine if p.kind == "attention_qk"]
    assert [p.flops for p in attention] == [2 * pairs * HEADS * WIDTH]


def test_only_routed_experts():
    # An implementation that multiplies all 8 experts for all 3 tokens: 24 rows where 3 x 2 are routed.
    trace = llama(layers=1, seq=3, ffn=lambda layer: moe_ffn("layers.0.moe", inner=27))
    every = ExpertCall(experts=8, top_k=2, tokens=3, rows=(3,) * 8)
    ops = tuple(
        replace(op, experts=every, gemms=(replace(op.gemms[0], batch=8, m=3, rows=24),)) if op.experts else op
        for op in trace.ops
    )
    executed, engine = served(replace(trace, ops=ops))
    assert flops(executed, "layers.0.moe.experts.gate_up") == 2 * 24 * HIDDEN * 54
    assert flops(engine, "layers.0.moe.experts.gate_up") == 2 * 6 * HIDDEN * 54
