"""Parts found in records made by hand, where names say nothing."""

from __future__ import annotations

from support.traces import HIDDEN, VOCABULARY, Recording, gated_ffn, llama, llama_layer, moe_ffn

from introspect.analyzers._structure import Structure
from introspect.graph import Graph


def parts(trace):
    """Parameters (without ".weight") of the products of each part."""
    structure = Structure(Graph(trace))

    def names(ops):
        return {path.removesuffix(".weight") for i in ops if i in structure.matrices for path in structure.matrices[i]}

    return structure, names


def test_llama():
    structure, names = parts(llama(layers=1))
    assert names(structure.mixers) == {f"layers.0.attn.{name}" for name in "qkvo"}
    assert names(structure.ffn) == {f"layers.0.ffn.{name}" for name in ("gate", "up", "down")}
    assert names(structure.heads) == {"head"}
    assert len(structure.residual_adds) == 2
    assert not structure.router
    assert not structure.experts


def test_routed_and_shared_experts():
    structure, names = parts(llama(layers=1, ffn=lambda layer: moe_ffn("layers.0.moe", shared=49)))
    assert names(structure.experts) == {"layers.0.moe.experts.gate_up", "layers.0.moe.experts.down"}
    assert names(structure.router) == {"layers.0.moe.gate"}
    assert names(structure.shared_experts) == {f"layers.0.moe.shared.{name}" for name in ("gate", "up", "down")}
    assert names(structure.mixers) == {f"layers.0.attn.{name}" for name in "qkvo"}


def test_a_parallel_block_keeps_attention_and_ffn_apart():
    # x + (attention(x) + ffn(x)), as Falcon and GPT-J add them
    r = Recording()
    x = r.lookup("embed.weight", VOCABULARY, HIDDEN, 6)
    normed = r.norm(x, "layers.0.norm")
    q, k, v = (r.linear(normed, f"layers.0.{name}", HIDDEN) for name in ("a", "b", "c"))
    mixed = r.attention(q, k, v, heads=4, kv_heads=4, width=8, module="layers.0")
    mixed = r.linear(mixed, "layers.0.d", HIDDEN)
    ffn = gated_ffn(r, normed, "layers.0.e", 81)
    both = r.op("add", (mixed, ffn), r.tensors[x].shape, module="layers.0")
    r.op("add", (both, x), r.tensors[x].shape, module="layers.0")
    structure, names = parts(r.trace())
    assert names(structure.mixers) == {"layers.0.a", "layers.0.b", "layers.0.c", "layers.0.d"}
    assert names(structure.ffn) == {"layers.0.e.gate", "layers.0.e.up", "layers.0.e.down"}


def test_a_stream_that_starts_at_a_product():
    # No lookup: a projected input (a patch embedding) that is skipped and added again is the stream.
    r = Recording()
    x = r.linear(r.tensor((1, 6, 147)), "patch", HIDDEN)
    x = llama_layer(r, x, 0)
    r.norm(x, "norm")
    structure, names = parts(r.trace())
    assert names(structure.mixers) == {f"layers.0.attn.{name}" for name in "qkvo"}
    assert names(structure.ffn) >= {"layers.0.ffn.gate", "layers.0.ffn.up", "layers.0.ffn.down"}


def test_a_gate_on_the_attention_output_belongs_to_the_mixer():
    r = Recording()
    x = r.lookup("embed.weight", VOCABULARY, HIDDEN, 6)
    q, k, v, gate = (r.linear(x, f"layers.0.{name}", HIDDEN) for name in ("a", "b", "c", "gate"))
    mixed = r.attention(q, k, v, heads=4, kv_heads=4, width=8, module="layers.0")
    opened = r.op("sigmoid", (gate,), r.tensors[x].shape, kind="activation", module="layers.0")
    gated = r.op("mul", (mixed, opened), r.tensors[x].shape, module="layers.0")
    r.op("add", (x, r.linear(gated, "layers.0.o", HIDDEN)), r.tensors[x].shape, module="layers.0")
    structure, names = parts(r.trace())
    assert names(structure.mixers) == {f"layers.0.{name}" for name in ("a", "b", "c", "gate", "o")}


def test_a_last_product_of_another_width_is_no_head():
    r = Recording()
    x = llama_layer(r, r.lookup("embed.weight", VOCABULARY, HIDDEN, 6), 0)
    r.linear(x, "score", 2)
    structure, names = parts(r.trace())
    assert names(structure.heads) == set()
    assert "score" not in names(structure.ffn)


def test_without_residuals_a_product_after_attention_still_ends_the_mixer():
    r = Recording()
    x = r.tensor((1, 6, HIDDEN))
    q, k, v = (r.linear(x, name, HIDDEN) for name in ("a", "b", "c"))
    mixed = r.attention(q, k, v, heads=4, kv_heads=4, width=8, module="")
    r.linear(r.linear(mixed, "d", HIDDEN), "e", 81)
    structure, names = parts(r.trace())
    assert names(structure.mixers) == {"a", "b", "c", "d"}
