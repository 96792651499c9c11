"""Bytes kept for the backward pass under other attention kernels, against real steps."""

from __future__ import annotations

import pytest
import torch
from support.tiny import build, record

from introspect.analyzers._saved import fused_bytes, logits_bytes, materialised_bytes, megatron_bytes, saved_storages
from introspect.analyzers._structure import Structure
from introspect.graph import Graph

BATCH, SEQ = 2, 12


def trained(name, dtype=torch.float32, **sizes):
    return record(build(name, dtype=dtype, **sizes), phase="train", batch=BATCH, seq=SEQ)


def kept_by_a_real_step(name, implementation, dtype, **sizes):
    """What torch's saved-tensor hooks hold in a plain CPU step: unique storages that are no parameter."""
    model = build(name, device="cpu", dtype=dtype, **sizes).train()
    model.set_attn_implementation(implementation)
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    held, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            held[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    ids = torch.arange(BATCH * SEQ).view(BATCH, SEQ)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, labels=ids.clone(), use_cache=False).loss.backward()
    return sum(held.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "sizes"), [("Llama", {}), ("Qwen3", {"head_dim": 16})])
def test_materialised_scores_are_what_eager_attention_keeps(name, sizes, dtype):
    assert materialised_bytes(trained(name, dtype, **sizes)) == kept_by_a_real_step(name, "eager", dtype, **sizes)


def test_attention_that_is_fused_already_stays():
    trace = trained("Llama")

    assert fused_bytes(trace) == trace.saved_bytes


def test_written_out_attention_fused_keeps_no_scores():
    trace = trained("Bloom", n_layer=2, n_head=4)
    scores = [one for one in saved_storages(trace) if one.is_scores]

    assert {one.shape[-2:] for one in scores} == {(SEQ, SEQ)}
    lse = 2 * BATCH * 4 * SEQ * 4
    assert fused_bytes(trace) == trace.saved_bytes - sum(one.bytes for one in scores) + lse
    assert materialised_bytes(trace) == trace.saved_bytes


def test_every_kept_storage_has_the_op_that_wrote_it():
    trace = trained("Llama")
    found = saved_storages(trace)

    assert len(found) == len(trace.saved)
    assert sum(one.bytes for one in found) == trace.saved_bytes
    (attention,) = {
        one.op
        for one in found
        if one.module == "model.layers.0.self_attn" and one.dtype == "fp32" and len(one.shape) == 3
    }
    assert attention == "introspect.attention.default"  # the log-sum-exp [B, H, S]
    assert [one.op for one in found if one.module == ""].count("input") <= 2  # ids and labels


def test_the_formula_takes_its_letters_from_the_record():
    structure = Structure(Graph(trained("Llama")))

    # two layers, s b = 24, h = 64, a = 4, scores 12 wide
    assert megatron_bytes(structure) == 2 * (34 * 24 * 64 + 5 * 4 * 24 * 12)


def test_the_formula_knows_no_model_without_attention():
    assert megatron_bytes(Structure(Graph(trained("Mamba", state_size=4)))) is None


def test_logits_are_what_the_loss_reads():
    assert logits_bytes(trained("Llama")) == BATCH * SEQ * 512 * 4
    assert logits_bytes(record(build("Llama"), seq=4)) is None
