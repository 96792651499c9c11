"""Products of records made by hand: FLOPs, bytes, names, parallel kinds, merging."""

from __future__ import annotations

from support.traces import HEADS, HIDDEN, INNER, KV_HEADS, VOCABULARY, WIDTH, Recording, llama, moe_ffn

from introspect.analyzers._products import fuse, products
from introspect.analyzers._structure import Structure
from introspect.graph import Graph
from introspect.records import Gemm


def read(trace):
    return products(Structure(Graph(trace)))


def by_name(found):
    return {(p.module, p.kind): p for p in found}


def test_a_linear():
    gate = by_name(read(llama(batch=2, seq=6)))["layers.0.ffn.gate", "linear"]
    assert (gate.batch, gate.m, gate.k, gate.n) == (1, 12, HIDDEN, INNER)
    assert gate.flops == gate.masked_flops == 2 * 12 * 32 * 81
    assert gate.bytes == 2 * (12 * 32 + 32 * 81 + 12 * 81)  # operands once, result once, bf16
    assert gate.weights == (("layers.0.ffn.gate.weight", 32 * 81),)


def test_attention_counts_dense_and_visible_pairs():
    found = by_name(read(llama(batch=2, seq=6)))
    scores, context = (found["layers.0.attn", kind] for kind in ("attention_qk", "attention_pv"))
    assert (scores.batch, scores.m, scores.k, scores.n) == (2 * HEADS, 6, WIDTH, 6)
    assert scores.flops == 2 * 8 * 6 * 8 * 6
    assert scores.masked_flops == 2 * (2 * 21) * HEADS * WIDTH  # 1 + 2 + ... + 6 = 21 pairs a sequence
    assert context.masked_flops == scores.masked_flops
    assert scores.bytes == 2 * (2 * 6 * HEADS * WIDTH + 2 * 6 * KV_HEADS * WIDTH)  # keys before any head expansion
    assert context.lhs_bytes == 0  # probabilities are never stored


def test_grouped_reads_the_experts_with_rows():
    # 3 tokens x 2 of 8 experts: 6 rows on 6 experts
    found = by_name(read(llama(layers=1, seq=3, ffn=lambda layer: moe_ffn("layers.0.moe", inner=27))))
    up = found["layers.0.moe.experts.gate_up", "grouped"]
    assert (up.batch, up.m, up.k, up.n) == (6, 1, HIDDEN, 54)
    assert up.flops == 2 * 6 * 32 * 54
    assert up.rhs_bytes == 2 * 6 * 32 * 54
    assert up.weights == (("layers.0.moe.experts.gate_up", 8 * 32 * 54),)  # all experts are parameters


def test_merging_needs_one_input_one_parent_and_one_parallel_kind():
    ffn = moe_ffn("layers.0.moe", shared=49)
    found = {p.module: p for p in fuse(read(llama(layers=1, ffn=lambda layer: ffn)))}
    qkv = found["layers.0.attn.q+k+v"]
    assert (qkv.m, qkv.k, qkv.n) == (6, HIDDEN, (HEADS + 2 * KV_HEADS) * WIDTH)
    assert qkv.lhs_bytes == 2 * 6 * HIDDEN  # the input is read once
    assert qkv.flops == 2 * 6 * 32 * 64
    assert found["layers.0.moe.shared.gate+up"].n == 2 * 49
    assert found["layers.0.moe.gate"].parallel == "router"  # reads what the shared expert reads, and stays alone


def test_merging_keeps_flops_and_parameters():
    found = read(llama())
    merged = fuse(found)
    assert len(found) - len(merged) == 2 * 3  # each layer: q, k, v into one and gate, up into one
    assert sum(p.flops for p in merged) == sum(p.flops for p in found)
    assert {w for p in merged for w in p.weights} == {w for p in found for w in p.weights}


def test_a_projection_that_feeds_another_is_latent_and_not_merged_with_heads():
    r = Recording()
    x = r.lookup("embed.weight", VOCABULARY, HIDDEN, 6)
    down = r.linear(x, "layers.0.attn.down", 9)
    q = r.linear(r.norm(down, "layers.0.attn.norm"), "layers.0.attn.up", HIDDEN)
    k, v = (r.linear(x, f"layers.0.attn.{name}", HIDDEN) for name in "kv")
    mixed = r.attention(q, k, v, heads=4, kv_heads=4, width=8, module="layers.0.attn")
    r.op("add", (x, r.linear(mixed, "layers.0.attn.o", HIDDEN)), r.tensors[x].shape, module="layers.0")
    merged = {p.module: p for p in fuse(read(r.trace()))}
    assert merged["layers.0.attn.down"].parallel == "latent"
    assert merged["layers.0.attn.k+v"].n == 2 * HIDDEN


def test_a_value_written_in_between_is_another_input():
    r = Recording()
    x = r.op("silu", (r.tensor((6, HIDDEN)),), (6, HIDDEN))
    r.linear(x, "block.a", 5)
    r.op("neg_", (x,), (6, HIDDEN), out=x)
    r.linear(x, "block.b", 7)
    assert [p.module for p in fuse(read(r.trace()))] == ["block.a", "block.b"]


def test_constants_times_constants_are_no_product():
    r = Recording()
    positions = r.op("arange", (), (6,), kind="factory", dtype="fp32")
    frequencies = r.op("arange", (), (4,), kind="factory", dtype="fp32")
    gemm = Gemm(kind="einsum", batch=1, m=6, k=1, n=4, lhs=positions, rhs=frequencies, out=None)
    r.op("mm", (positions, frequencies), (6, 4), kind="gemm", gemms=(gemm,))
    assert read(r.trace()) == []


def test_a_cast_weight_makes_a_linear():
    r = Recording()
    x = r.tensor((6, HIDDEN))
    wide = r.op("_to_copy", (r.parameter("gate.weight", (8, HIDDEN)),), (8, HIDDEN), kind="cast", dtype="fp32")
    gemm = Gemm(kind="einsum", batch=1, m=6, k=HIDDEN, n=8, lhs=x, rhs=wide, out=None)
    r.op("mm", (x, wide), (6, 8), kind="gemm", module="gate", gemms=(gemm,))
    (product,) = read(r.trace())
    assert (product.kind, product.module) == ("linear", "gate")
    assert product.rhs_bytes == 4 * 8 * HIDDEN  # read as it was cast
