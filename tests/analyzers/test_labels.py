"""Primitive ops joined into what they make up."""

from __future__ import annotations

from collections import Counter

from support.traces import HIDDEN, INNER, VOCABULARY, Recording, llama, moe_ffn

from introspect.analyzers._labels import Labels
from introspect.analyzers._op_table import executed_kernels, fused_kernels, op_bytes, op_table
from introspect.analyzers._products import fuse, products
from introspect.analyzers._structure import Structure
from introspect.graph import Graph, base_name


def label(trace):
    return Labels(Structure(Graph(trace)))


def counts(labels):
    return Counter(labels.kind[first] for first in labels.groups())


def names(labels, kind):
    return [
        [base_name(labels.graph.ops[i]) for i in members]
        for first, members in labels.groups().items()
        if labels.kind[first] == kind
    ]


def test_llama():
    # 2 layers: two norms, residuals and one activation each, two cache writes; one lookup and one last norm
    assert counts(label(llama())) == {"norm": 5, "residual": 4, "activation": 2, "cache_write": 4, "lookup": 1}


def test_a_norm_is_eight_ops():
    norms = names(label(llama()), "norm")
    assert norms[0] == ["to_copy", "pow", "mean", "add", "rsqrt", "mul", "to_copy", "mul"]


def test_a_shifted_weight_belongs_to_the_norm():
    # Gemma: x * rsqrt(mean(x^2)) * (1 + weight)
    r = Recording()
    x = r.lookup("embed.weight", VOCABULARY, HIDDEN, 6)
    shape, row = r.tensors[x].shape, (1, 6, 1)
    mean = r.op("mean", (r.op("pow", (x,), shape),), row, kind="reduction")
    scaled = r.op("mul", (x, r.op("rsqrt", (mean,), row)), shape)
    shifted = r.op("add", (r.parameter("norm.weight", (HIDDEN,)),), (HIDDEN,))
    r.linear(r.op("mul", (scaled, shifted), shape), "head", VOCABULARY)
    labels = label(r.trace())
    assert names(labels, "norm") == [["pow", "mean", "rsqrt", "mul", "mul"]]
    assert names(labels, "weights") == [["add"]]


def test_a_layer_norm_by_hand():
    r = Recording()
    x = r.lookup("embed.weight", VOCABULARY, HIDDEN, 6)
    shape, row = r.tensors[x].shape, (1, 6, 1)
    centred = r.op("sub", (x, r.op("mean", (x,), row, kind="reduction")), shape)
    variance = r.op("mean", (r.op("pow", (centred,), shape),), row, kind="reduction")
    scaled = r.op("div", (centred, r.op("sqrt", (variance,), row)), shape)
    weighted = r.op("mul", (scaled, r.parameter("norm.weight", (HIDDEN,))), shape)
    r.linear(r.op("add", (weighted, r.parameter("norm.bias", (HIDDEN,))), shape), "head", VOCABULARY)
    assert names(label(r.trace()), "norm") == [["mean", "sub", "pow", "mean", "sqrt", "div", "mul", "add"]]


def test_a_layer_norm_that_centres_twice():
    # Cohere: (x - mean) * rsqrt(mean((x - mean)^2)), the difference taken anew
    r = Recording()
    x = r.lookup("embed.weight", VOCABULARY, HIDDEN, 6)
    shape, row = r.tensors[x].shape, (1, 6, 1)
    wide = r.op("_to_copy", (x,), shape, kind="cast", dtype="fp32")
    mean = r.op("mean", (wide,), row, kind="reduction", dtype="fp32")
    square = r.op("pow", (r.op("sub", (wide, mean), shape, dtype="fp32"),), shape, dtype="fp32")
    root = r.op("rsqrt", (r.op("mean", (square,), row, kind="reduction", dtype="fp32"),), row, dtype="fp32")
    scaled = r.op("mul", (r.op("sub", (wide, mean), shape, dtype="fp32"), root), shape, dtype="fp32")
    r.linear(r.op("mul", (r.parameter("norm.weight", (HIDDEN,)), scaled), shape), "head", VOCABULARY)
    expected = ["to_copy", "mean", "sub", "pow", "mean", "rsqrt", "sub", "mul", "mul"]
    assert names(label(r.trace()), "norm") == [expected]


def test_a_statistic_that_scales_something_else_is_no_norm():
    # HY-V4 scales a projection of x by the inverse norm of x, then by a learned factor
    r = Recording()
    x = r.lookup("embed.weight", VOCABULARY, HIDDEN, 6)
    mean = r.op("mean", (r.op("pow", (x,), (1, 6, HIDDEN)),), (1, 6, 1), kind="reduction")
    scaled = r.op("mul", (r.linear(x, "mix", 9), r.op("rsqrt", (mean,), (1, 6, 1))), (1, 6, 9))
    r.op("mul", (scaled, r.parameter("scale", (9,))), (1, 6, 9))
    assert "norm" not in counts(label(r.trace()))


def test_a_mean_over_positions_is_no_norm():
    r = Recording()
    x = r.lookup("embed.weight", VOCABULARY, HIDDEN, 6)
    r.linear(r.op("mean", (x,), (1, HIDDEN), kind="reduction"), "score", 2)
    assert counts(label(r.trace())) == {"lookup": 1, "reduction": 1}


def rotated(r, x, cos, sin):
    shape = r.tensors[x].shape
    swapped = r.op("cat", (r.op("neg", (x,), shape), x), shape, kind="copy")
    return r.op("add", (r.op("mul", (x, cos), shape), r.op("mul", (swapped, sin), shape)), shape)


def test_rotations_of_query_and_key_are_two():
    r = Recording()
    x = r.lookup("embed.weight", VOCABULARY, HIDDEN, 6)
    angles = r.tensor((6,), dtype="int64", role="index")
    cos, sin = (r.op(name, (angles,), (6, HIDDEN)) for name in ("cos", "sin"))
    q, k = (rotated(r, r.linear(x, f"layers.0.{name}", HIDDEN), cos, sin) for name in "qk")
    r.attention(q, k, k, heads=4, kv_heads=4, width=8, module="layers.0")
    labels = label(r.trace())
    assert [sorted(ops) for ops in names(labels, "rope")] == [["add", "cat", "mul", "mul", "neg"]] * 2
    assert counts(labels)["setup"] == 2
    merged = len({p.op for p in fuse(products(labels.structure))})
    assert fused_kernels(labels, merged) == merged + 1 + 1  # the lookup, and both rotations in one kernel


def test_scores_scaled_for_softmax_are_no_activation():
    r = Recording()
    x = r.linear(r.lookup("embed.weight", VOCABULARY, HIDDEN, 6), "proj", HIDDEN)
    scaled = r.op("mul", (x,), r.tensors[x].shape)
    r.linear(r.op("_softmax", (scaled,), r.tensors[x].shape, kind="softmax"), "out", HIDDEN)
    assert counts(label(r.trace())) == {"lookup": 1, "elementwise": 1, "softmax": 1}


def test_routing():
    labels = label(llama(layers=1, ffn=lambda layer: moe_ffn("layers.0.moe", shared=49)))
    found = names(labels, "routing")
    assert found == [["sort", "index"], ["mul", "sum", "add"]]
    assert names(labels, "activation") == [["silu", "mul"], ["silu", "mul"]]


def test_the_table_counts_elements_and_bytes():
    rows = {row["kind"]: row for row in op_table(label(llama(batch=1, seq=6))).rows}
    activation = rows["activation"]
    assert (activation["count"], activation["kernels"]) == (2, 4)
    assert activation["elements"] == 2 * 6 * INNER
    # silu reads 1 and writes 1, mul reads 2 and writes 1; fused: 2 read and 1 written; bf16, 2 layers
    assert activation["bytes"] == 2 * 5 * 2 * 6 * INNER
    assert activation["fused_bytes"] == 2 * 3 * 2 * 6 * INNER
    assert rows["norm"]["compute_dtype"] == "fp32"
    assert rows["residual"]["compute_dtype"] == "bf16"
    assert rows["lookup"]["bytes"] == 2 * 6 * HIDDEN + 8 * 6 + 2 * 6 * HIDDEN  # rows taken, ids, result


def test_kernels():
    labels = label(llama(layers=1))
    graph = labels.graph
    # lookup; 3 norms of 8 ops; 7 products and the head, attention one; 2 cache writes, 2 adds, silu and mul
    assert executed_kernels(graph) == 1 + 3 * 8 + 8 + 1 + 2 + 2 + 2
    merged = len({p.op for p in fuse(products(labels.structure))})
    assert merged == 6  # qkv, attention, o, gate-up, down, head
    assert fused_kernels(labels, merged) == 6 + 1 + 3 + 1 + 1  # lookup, norms with residuals, cache write, activation


def test_what_is_overwritten_is_not_read():
    r = Recording()
    x = r.op("silu", (r.tensor((6, 4)),), (6, 4), kind="activation")
    held = r.tensor((6, 4), role="cache")
    r.op("copy_", (held, x), (), kind="cache_write", out=held)
    assert op_bytes(Graph(r.trace()), 1) == 2 * 6 * 4 * 2
