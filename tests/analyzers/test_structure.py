"""Parts found in records made by hand, where names say nothing."""

from __future__ import annotations

from support.traces import HIDDEN, VOCABULARY, Recording, gated_ffn, llama, llama_layer, moe_ffn

from introspect.analyzers._structure import Structure
from introspect.graph import Graph
from introspect.records import ExpertCall, Gemm


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


def mixed_streams(r, x, layer):
    """Hyper-connections: four copies of the stream, mixed by a product within each token, scaled by learned gates."""
    path = f"layers.{layer}"
    shape = r.tensors[x].shape  # [1, 6, 4, HIDDEN]
    gates = r.linear(r.view(x, (6, 4 * HIDDEN), module=path), f"{path}.mix", 4)
    pooled = r.op("mul", (x, r.view(gates, (1, 6, 4, 1), module=path)), shape, module=path)
    block_input = r.op("sum", (pooled,), (1, 6, HIDDEN), kind="reduction", module=path)
    q, k, v = (r.linear(block_input, f"{path}.attn.{name}", HIDDEN) for name in "qkv")
    mixed = r.attention(q, k, v, heads=4, kv_heads=4, width=8, module=f"{path}.attn")
    spread = r.op("mul", (r.linear(mixed, f"{path}.attn.o", HIDDEN), gates), shape, module=path)
    square = r.linear(r.view(x, (6, 4 * HIDDEN), module=path), f"{path}.square", 16)
    gemm = Gemm(kind="einsum", batch=6, m=4, k=4, n=HIDDEN, lhs=square, rhs=x, out=None)
    kept = r.op("bmm", (square, x), shape, kind="gemm", module=path, gemms=(gemm,))
    return r.op("add", (spread, kept), shape, module=path)


def test_copies_of_the_stream_mixed_within_tokens_stay_a_stream():
    r = Recording()
    x = r.lookup("embed.weight", VOCABULARY, HIDDEN, 6)
    x = r.op("repeat", (x,), (1, 6, 4, HIDDEN), kind="copy")
    for layer in range(2):
        x = mixed_streams(r, x, layer)
    structure, names = parts(r.trace())
    assert len(structure.residual_adds) == 2
    for layer in range(2):
        path = f"layers.{layer}"
        assert names(structure.mixers) >= {f"{path}.attn.{name}" for name in "qkvo"}
        assert f"{path}.square" in names(structure.ffn)


def test_what_enters_the_cache_belongs_to_a_mixer():
    # A compressor whose entries only later steps read
    r = Recording(phase="decode", seq=1, context=40)
    x = llama_layer(r, r.lookup("embed.weight", VOCABULARY, HIDDEN, 1), 0)
    held = r.tensor((1, 1, 9), role="cache")
    r.op("copy_", (held, r.linear(x, "layers.1.compress", 9)), (), kind="cache_write", module="layers.1", out=held)
    structure, names = parts(r.trace())
    assert "layers.1.compress" in names(structure.mixers)


def test_weights_that_a_top_k_chose_scale_experts_and_not_the_stream():
    # Llama 4 scales what the experts read
    r = Recording()
    x = r.lookup("embed.weight", VOCABULARY, HIDDEN, 6)
    scores = r.linear(x, "layers.0.gate", 8)
    chosen = r.op("topk", (scores,), (6, 1), kind="topk", module="layers.0")
    scaled = r.op("mul", (x, chosen), (6, HIDDEN), module="layers.0")
    call = ExpertCall(experts=8, top_k=1, tokens=6, rows=(1, 1, 1, 1, 1, 1, 0, 0))
    out = r.grouped(scaled, "layers.0.experts.up", HIDDEN, call)
    r.op("add", (x, r.view(out, (1, 6, HIDDEN))), (1, 6, HIDDEN), module="layers.0")
    structure, names = parts(r.trace())
    assert names(structure.router) == {"layers.0.gate"}


def test_a_convolution_along_the_sequence_mixes_and_one_over_images_does_not():
    r = Recording()
    x = r.lookup("embed.weight", VOCABULARY, HIDDEN, 6)
    for name, kernel in (("long", (3,)), ("point", (1,)), ("image", (3, 3))):
        weight = r.parameter(f"layers.0.{name}.weight", (HIDDEN, 1, *kernel))
        gemm = Gemm(kind="conv", batch=HIDDEN, m=6, k=3, n=1, lhs=x, rhs=weight, out=None)
        out = r.op("convolution", (x, weight), r.tensors[x].shape, kind="gemm", module="layers.0", gemms=(gemm,))
        x = r.op("add", (x, r.linear(out, f"layers.0.{name}_out", HIDDEN)), r.tensors[x].shape, module="layers.0")
    structure, names = parts(r.trace())
    assert names(structure.mixers) == {"layers.0.long", "layers.0.long_out"}
    assert names(structure.ffn) == {"layers.0.point", "layers.0.point_out", "layers.0.image_out"}


def test_a_row_statistic_of_the_stream_does_not_make_a_product_of_it_a_stream():
    # HY-V4 scales the projection of the stream by the stream's inverse norm
    r = Recording()
    x = r.lookup("embed.weight", VOCABULARY, HIDDEN, 6)
    mean = r.op("mean", (r.op("pow", (x,), (1, 6, HIDDEN)),), (1, 6, 1), kind="reduction")
    scaled = r.op("mul", (r.linear(x, "layers.0.mix", 9), r.op("rsqrt", (mean,), (1, 6, 1))), (1, 6, 9))
    structure, _ = parts(r.trace())
    assert not structure.stream[next(i for i, op in enumerate(structure.graph.ops) if scaled in op.outputs)]


def test_experts_that_make_queries_are_attention():
    # JetMoe routes each token's queries, and its attention's result, through experts
    r = Recording()
    x = r.lookup("embed.weight", VOCABULARY, HIDDEN, 6)
    path = "layers.0.attn"
    chosen = r.op("topk", (r.linear(x, f"{path}.gate", 8),), (6, 1), kind="topk", module=path)
    order = r.op("sort", (chosen,), (6,), kind="sort", module=path, dtype="int64")
    call = ExpertCall(experts=8, top_k=1, tokens=6, rows=(1, 1, 1, 1, 1, 1, 0, 0))
    rows = r.op("index", (x, order), (6, HIDDEN), kind="gather", module=path)
    q = r.grouped(rows, f"{path}.experts.up", HIDDEN, call)
    kv = r.linear(x, f"{path}.kv", HIDDEN)
    mixed = r.attention(q, kv, kv, heads=4, kv_heads=4, width=8, module=path)
    rows = r.op("index", (mixed, order), (6, HIDDEN), kind="gather", module=path)
    out = r.op("mul", (r.grouped(rows, f"{path}.experts.down", HIDDEN, call), chosen), (6, HIDDEN), module=path)
    r.op("add", (x, r.view(out, (1, 6, HIDDEN))), (1, 6, HIDDEN), module="layers.0")
    structure, names = parts(r.trace())
    assert names(structure.router) == {f"{path}.gate"}
    assert names(structure.mixers) >= {f"{path}.kv", f"{path}.experts.up", f"{path}.experts.down"}
    assert names(structure.ffn) == set()
