"""Which matrices a format is applied to, and what they take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.traces import HIDDEN, INNER, VOCABULARY, Recording, llama, moe_ffn

from introspect.analyzers._quantised import in_format, kept, natively, quantisable
from introspect.analyzers._roofline import Machine, step_work
from introspect.analyzers._step import Step
from introspect.analyzers._structure import Structure
from introspect.formats import Matrix, StoredTensor, load_formats
from introspect.gpus import find_gpus
from introspect.graph import Graph
from introspect.native_record import NativeFormat, StoredParameter

FORMATS = load_formats()
(H100,) = find_gpus(("h100-sxm",))
(A100,) = find_gpus(("a100-80g",))


def structure(**facts):
    return Structure(Graph(llama(**facts)))


def test_matrices_of_layers_and_nothing_else():
    found = {one.path: one.matrix for one in quantisable(structure(layers=1))}

    assert found == {
        "layers.0.attn.q.weight": Matrix(32, 32),
        "layers.0.attn.k.weight": Matrix(16, 32),
        "layers.0.attn.v.weight": Matrix(16, 32),
        "layers.0.attn.o.weight": Matrix(32, 32),
        "layers.0.ffn.gate.weight": Matrix(INNER, HIDDEN),
        "layers.0.ffn.up.weight": Matrix(INNER, HIDDEN),
        "layers.0.ffn.down.weight": Matrix(HIDDEN, INNER),
    }


def test_experts_are_stacked_and_routers_stay():
    found = {one.path: one.matrix for one in quantisable(structure(ffn=lambda layer: moe_ffn(f"layers.{layer}.moe")))}

    assert found["layers.0.moe.experts.gate_up"] == Matrix(54, HIDDEN, 8)
    assert found["layers.0.moe.experts.down"] == Matrix(HIDDEN, 27, 8)
    assert not any("moe.gate" in path for path in found)


def test_a_transposed_weight_is_a_matrix_of_its_product():
    r = Recording()
    x = r.lookup("embed.weight", VOCABULARY, HIDDEN, r.run.tokens)
    r.linear(r.norm(x, "norm"), "head", VOCABULARY)

    assert quantisable(Structure(Graph(r.trace()))) == ()  # a head outside layers stays


def test_bytes_add_up():
    one = structure()
    quantised = in_format("int4-g128", FORMATS["int4-g128"], quantisable(one), one)
    plain = in_format("bf16", FORMATS["bf16"], quantisable(one), one)
    matrices = sum(m.matrix.elements for m in quantisable(one))

    assert plain.weight_bytes == sum(p.bytes for p in one.graph.trace.parameters)
    assert plain.bits_per_weight is None
    assert quantised.params == matrices
    assert quantised.kept_bytes == plain.weight_bytes - 2 * matrices
    assert quantised.weight_bytes == quantised.packed_bytes + quantised.scale_bytes + quantised.kept_bytes


@given(st.sets(st.sampled_from(["*.attn.o*", "*ffn.down", "layers.0*", "*"])))
def test_keeping_more_never_takes_less(patterns):
    one = structure()
    matrices = quantisable(one)
    fewer = in_format("nf4", FORMATS["nf4"], matrices, one)
    more = in_format("nf4", FORMATS["nf4"], matrices, one, patterns)

    assert set(more.stored) == {m.path for m in matrices if not kept(m, patterns)}
    # these matrices are far larger than a scale and a table
    assert not more.stored or more.bits_per_weight < 16
    assert more.kept_bytes >= fewer.kept_bytes


def work(name, machine, **facts):
    step = Step(llama(phase="decode", seq=1, context=16, **facts))
    quantised = in_format(name, FORMATS[name], quantisable(step.structure), step.structure)
    before = step_work(step)
    return step, before, quantised.works(before, machine)


def test_weight_only_reads_less_and_computes_as_before():
    _, before, after = work("int4-g128", Machine(gpu=H100))

    for old, new in zip(before, after, strict=True):
        assert (new.flops, new.dtype, new.cache_bytes) == (old.flops, old.dtype, old.cache_bytes)
        in_layer = old.module.startswith("layers") and bool(old.weights)
        assert (new.weight_bytes < old.weight_bytes) == in_layer


def test_fp8_computes_in_fp8_where_the_gpu_has_it():
    _, _, on_h100 = work("fp8-channel", Machine(gpu=H100))
    _, _, on_a100 = work("fp8-channel", Machine(gpu=A100))

    assert {one.dtype for one in on_h100 if one.weights and one.module.startswith("layers")} == {"fp8"}
    assert {one.dtype for one in on_a100} == {"bf16"}


def test_experts_read_their_share():
    _, before, after = work("mxfp4", Machine(gpu=H100), ffn=lambda layer: moe_ffn(f"layers.{layer}.moe"))
    stored = FORMATS["mxfp4"]

    for old, new in zip(before, after, strict=True):
        if old.experts is not None:
            share = sum(t.bytes for t in stored.tensors(Matrix(54, 32))) / (2 * 54 * 32)
            assert new.weight_bytes_of(1) <= old.weight_bytes_of(1)
            if "gate_up" in old.module:
                assert new.weight_bytes == pytest.approx(old.weight_bytes * share)
                assert new.expert_bytes == pytest.approx(old.expert_bytes * share)


def test_a_native_format_counts_what_it_stores():
    one = structure(layers=1)
    path = "layers.0.attn.q.weight"
    stored = StoredParameter(
        parameter=path,
        tensors=(StoredTensor("packed", (32, 32), "fp8_e4m3fn"), StoredTensor("scale", (1,), "fp32")),
        compute="fp8",
    )
    found = natively(NativeFormat(method="fp8", route="", parameters=(stored,)), one)

    assert (found.packed_bytes, found.scale_bytes, found.params) == (32 * 32, 4, 32 * 32)
    assert found.kept_bytes == sum(p.bytes for p in one.graph.trace.parameters) - 2 * 32 * 32
    assert (found.compute(Machine(gpu=H100)), found.compute(Machine(gpu=A100))) == ("fp8", None)


def test_a_parameter_the_model_does_not_have_is_left_out():
    stored = StoredParameter(parameter="mtp.weight", tensors=(StoredTensor("packed", (8,), "uint8"),))

    assert natively(NativeFormat(method="", route="", parameters=(stored,)), structure()).stored == {}
