"""Dataflow over records made by hand."""

from __future__ import annotations

from dataclasses import replace

from support.traces import HIDDEN, Recording, llama

from introspect.graph import Graph, base_name
from introspect.records import Gemm, Op, Repeat


def positions(graph, name):
    return [i for i, op in enumerate(graph.ops) if base_name(op) == name]


def test_a_view_is_no_producer():
    r = Recording()
    x = r.op("silu", (r.tensor((6, 4)),), (6, 4))
    flat = r.view(x, (24,))
    r.op("neg", (flat,), (24,))
    graph = Graph(r.trace())
    assert graph.producers[2] == (0,)
    assert graph.consumers[0] == [2]


def test_a_write_in_place_extends_the_chain():
    r = Recording()
    x = r.op("silu", (r.tensor((6, 4)),), (6, 4))
    r.op("add", (x, r.tensor((6, 4))), (6, 4), out=x)
    r.op("neg", (x,), (6, 4))
    graph = Graph(r.trace())
    assert graph.producers[2] == (1,)
    assert graph.back([2], lambda i: False) == {0, 1, 2}


def test_a_tensor_assembled_by_copies_follows_from_all_of_them():
    r = Recording()
    first = r.op("silu", (r.tensor((6, 4)),), (6, 4))
    second = r.op("gelu", (r.tensor((6, 4)),), (6, 4))
    whole = r.op("new_empty", (first,), (6, 8), kind="factory")
    for part in (first, second):
        half = r.tensor((6, 4), storage=r.tensors[whole].storage)
        r.op("copy_", (half, part), (6, 4), kind="copy", out=half)
    r.op("neg", (whole,), (6, 8))
    graph = Graph(r.trace())
    assert {0, 1} <= graph.back([5], lambda i: False)


def test_a_factory_takes_a_shape_and_no_value():
    r = Recording()
    x = r.op("silu", (r.tensor((6, 4)),), (6, 4))
    r.op("zeros_like", (x,), (6, 4), kind="factory")
    graph = Graph(r.trace())
    assert graph.producers[1] == (-1,)
    assert graph.nature[1] == "constant"


def test_an_allocation_that_nobody_fills_is_an_input():
    r = Recording()
    x = r.op("empty_like", (), (6, 4), kind="factory")
    r.op("native_layer_norm", (x, r.parameter("norm.weight", (4,))), (6, 4), kind="norm")
    graph = Graph(r.trace())
    assert graph.producers[1] == (-1, -1)
    assert graph.nature[1] == "data"


def test_natures():
    r = Recording()
    x = r.tensor((6, 4))
    weight = r.parameter("norm.weight", (4,))
    shifted = r.op("add", (weight,), (4,))
    positions_ = r.tensor((6,), dtype="int64", role="index")
    mask = r.op("le", (positions_,), (6, 6), dtype="bool")
    scaled = r.op("mul", (x, shifted), (6, 4))
    r.op("where", (mask, scaled), (6, 4))
    graph = Graph(r.trace())
    assert graph.nature == ["weight", "constant", "data", "data"]
    assert graph.input_weights(2, 1) == {"norm.weight"}
    assert graph.input_weights(2, 0) == set()


def test_a_constant_outside_the_buffers_is_no_input():
    r = Recording()
    r.op("mul", (r.tensor((4,), dtype="fp32"), r.tensor((6,), dtype="int64", role="index")), (6, 4))
    assert Graph(r.trace()).nature == ["constant"]


def test_a_cast_weight_is_still_the_weight():
    r = Recording()
    x = r.op("silu", (r.tensor((6, 4)),), (6, 4))
    wide = r.op("_to_copy", (r.parameter("router.weight", (8, 4)),), (8, 4), kind="cast", dtype="fp32")
    gemm = Gemm(kind="einsum", batch=1, m=6, k=4, n=8, lhs=x, rhs=wide, out=None)
    r.op("mm", (x, wide), (6, 8), kind="gemm", gemms=(gemm,))
    graph = Graph(r.trace())
    assert graph.gemm_weights(2, gemm) == {"router.weight"}
    assert graph.nature == ["data", "weight", "data"]


def test_ahead_stops_where_told():
    graph = Graph(llama())
    (lookup,) = positions(graph, "embedding")
    first_add = next(i for i in positions(graph, "add") if len(graph.ops[i].inputs) == 2)
    assert first_add in graph.ahead([lookup], lambda i: False)
    assert first_add not in graph.ahead([lookup], lambda i: i >= first_add)


def test_folded_bodies_count_their_repeats():
    trace = llama()
    body = tuple(op for op in trace.ops if isinstance(op, Op))
    graph = Graph(replace(trace, ops=(Repeat(body=(Repeat(body=body[:2], count=3), *body[2:]), count=2),)))
    assert graph.times[:3] == [6, 6, 2]
    assert all(graph.repeated)


def test_the_stream_of_a_llama_is_as_wide_as_its_rows():
    graph = Graph(llama())
    assert graph.tensors[graph.ops[positions(graph, "embedding")[0]].outputs[0]].shape[-1] == HIDDEN
