from __future__ import annotations

from collections import Counter

import pytest
import torch
from support.tiny import IDENTITY, build, record
from torch import nn

from introspect.errors import ModelRunError
from introspect.hooks.observe import _observe, observe
from introspect.records import RunShape

BATCH, SEQ = 2, 12
SIZES = {
    "Llama": {},
    "Qwen3": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "sliding_window": 8},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "GptOss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Bloom": {"n_layer": 2, "n_head": 4},
    # calls torch's fused attention itself
    "Falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False, "bias": False},
    "Qwen3Next": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
}


def gemms(trace):
    """Every product with its module, direction and sizes, as often as it ran."""
    found = Counter()
    for op, times in trace.walk():
        for g in op.gemms:
            found[op.module, g.kind, g.direction, op.backward, g.batch, g.m, g.k, g.n, g.rows] += times
    return found


def flops(trace, *directions, backward=None):
    return sum(
        g.flops * times
        for op, times in trace.walk()
        for g in op.gemms
        if g.direction in directions and g.kind in ("linear", "grouped") and backward in (None, op.backward)
    )


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_a_step_on_meta_records_the_products_and_saved_bytes_of_a_real_step(name, checkpointing):
    on_meta, real = (
        record(
            build(name, device=device, **SIZES[name]), phase="train", batch=BATCH, seq=SEQ, checkpointing=checkpointing
        )
        for device in ("meta", "cpu")
    )
    if name not in ("Mixtral", "DeepseekV3", "GptOss", "Qwen3Next"):  # their rows follow from values on the CPU
        assert gemms(real) == gemms(on_meta)
    assert flops(real, "forward", "dx", "dw") == flops(on_meta, "forward", "dx", "dw")

    assert (real.saved_bytes, real.recomputed_bytes) == (on_meta.saved_bytes, on_meta.recomputed_bytes)
    assert on_meta.unclassified == ()


class Kept:
    """What torch's own hooks hold in a plain training step: unique storages that are no parameter."""

    def __init__(self, model):
        self.parameters = {p.untyped_storage()._cdata for p in model.parameters()}
        self.bytes, self.alive = {}, []

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.parameters:
            self.alive.append(tensor)
            self.bytes[storage._cdata] = storage.nbytes()
        return tensor


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_saved_bytes_equal_what_hooks_hold_in_a_plain_step_with_torchs_own_flash_attention(name):
    """Multi-head, since torch's CPU kernel keeps expanded keys and values where heads are grouped."""
    sizes = {**SIZES[name], "num_key_value_heads": 4}
    recorded = record(build(name, **sizes), phase="train", batch=BATCH, seq=SEQ)
    model = build(name, device="cpu", **sizes).train()
    kept = Kept(model)
    ids = torch.arange(BATCH * SEQ).view(BATCH, SEQ)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        model(input_ids=ids, labels=ids.clone(), use_cache=False).loss.backward()

    assert recorded.saved_bytes == sum(kept.bytes.values())


@pytest.mark.parametrize("name", SIZES)
def test_weight_gradients_cost_two_forwards(name):
    trace = record(build(name, **SIZES[name]), phase="train", batch=BATCH, seq=SEQ)

    assert flops(trace, "dx") == flops(trace, "forward")
    assert flops(trace, "dw") == flops(trace, "forward")


def test_recomputation_repeats_every_layer_but_its_last_product():
    trace = record(build("Llama"), phase="train", batch=BATCH, seq=SEQ, checkpointing=True)
    repeated = {
        op.module.removeprefix("model.layers.")
        for op in trace.ops
        if op.gemms and op.backward and op.gemms[0].direction == "forward"
    }

    # torch's checkpoint stops once all that was saved is back: the input of down_proj, not its output.
    parts = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "self_attn",
        "mlp.gate_proj",
        "mlp.up_proj",
    )
    assert repeated == {f"{layer}.{part}" for layer in (0, 1) for part in parts}


def test_saved_and_recomputed_bytes_add_up_to_those_of_the_plain_step():
    plain, checkpointed = (
        record(build("Llama"), phase="train", batch=BATCH, seq=SEQ, checkpointing=c) for c in (False, True)
    )
    rotary = 2 * SEQ * 16 * 4  # cos and sin in fp32, made once, read by both layers' recomputation

    # In fp32 a layer's input is also what its first norm keeps, so both steps hold it.
    assert plain.saved_bytes == checkpointed.saved_bytes + 2 * checkpointed.recomputed_bytes - rotary


def test_training_mode_keeps_dropout_noise_and_is_left_as_it_was():
    without, noisy = (
        record(build("Phi3", pad_token_id=0, resid_pdrop=p), phase="train", seq=SEQ).saved_bytes for p in (0.0, 0.1)
    )

    # Off a GPU torch multiplies by noise in the compute dtype: two dropouts in each of two layers, [12, 64] in fp32.
    assert noisy == without + 2 * 2 * SEQ * 64 * 4
    model = build("Phi3", pad_token_id=0, resid_pdrop=0.1)
    record(model, phase="train", seq=SEQ)
    assert not any(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


class Plain(nn.Module):
    """[B, 8] -> [B, 4], no loss of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4, bias=False)

    def forward(self, x):
        return self.layer(x)


def test_a_module_without_a_loss_is_trained_on_its_summed_output():
    model = Plain().to("meta")
    trace = observe(model, IDENTITY, RunShape(phase="train"), inputs={"x": torch.zeros(3, 8)})

    # dW = dY^T X with 3 rows; nothing asks for the gradient of x, so there is no dX.
    assert [(g.direction, g.m, g.k, g.n) for op in trace.ops for g in op.gemms] == [
        ("forward", 3, 8, 4),
        ("dw", 4, 3, 8),
    ]
    assert "Plain computes no loss: the sum of its first output stands for one" in trace.assumptions
    # x, [3, 8] in fp32, is all that the product's backward needs beside the weight.
    assert trace.saved_bytes == 3 * 8 * 4


def test_checkpointing_a_module_that_has_none_is_said():
    trace = observe(
        Plain().to("meta"), IDENTITY, RunShape(phase="train", checkpointing=True), inputs={"x": torch.zeros(3, 8)}
    )

    assert "Plain has no gradient checkpointing: nothing was recomputed" in trace.assumptions
    assert trace.recomputed_bytes is None


def test_nothing_to_train_is_an_error_that_says_so():
    frozen = Plain().to("meta").requires_grad_(False)

    with pytest.raises(ModelRunError, match="Plain gives no output that depends on a trainable parameter"):
        observe(frozen, IDENTITY, RunShape(phase="train"), inputs={"x": torch.zeros(3, 8)})


def test_a_scan_trained_from_three_short_runs_equals_the_whole_step():
    model = build("Mamba", state_size=4, num_hidden_layers=1, vocab_size=64)
    run = RunShape(phase="train", seq=60)
    fitted, whole = observe(model, IDENTITY, run), _observe(model, IDENTITY, run, None, (), None)

    assert len(fitted.ops) < len(whole.ops) / 4
    assert fitted.saved_bytes == whole.saved_bytes
    for direction in ("forward", "dx", "dw"):
        assert every_flop(fitted, direction) == every_flop(whole, direction)


def every_flop(trace, direction):
    return sum(g.flops * times for op, times in trace.walk() for g in op.gemms if g.direction == direction)
