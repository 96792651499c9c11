"""Each replaced experts module against its own forward, on the CPU with random weights."""

from __future__ import annotations

import pytest
import torch
from support.tiny import LLAMA, build, products, record
from transformers import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from introspect.hooks.expert_modules import REPLACEMENTS, replaced_experts
from introspect.hooks.experts import ExpertsObserver
from introspect.hooks.shadow import Shadow
from introspect.records import RunShape

WIDTHS = {"hidden_size": 64, "num_hidden_layers": 1}
MODELS = {
    "Dbrx": {
        "d_model": 64, "n_heads": 4, "n_layers": 1,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "LongcatFlash": {
        "num_layers": 1, "ffn_hidden_size": 48, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 8, "moe_topk": 3, "n_routed_experts": 4, "zero_expert_num": 3,
        "expert_ffn_hidden_size": 24, "head_dim": 8, "num_key_value_heads": 4,
    },
    "Llama4": {"num_local_experts": 4, "intermediate_size_mlp": 48, "head_dim": 16, "num_hidden_layers": 1},
    "JetMoe": {"kv_channels": 16, "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
               "num_hidden_layers": 1},
}  # fmt: skip


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("name", MODELS)
def test_the_replacement_computes_what_the_module_does_and_is_taken_away_again(name):
    model = build(name, device="cpu", **MODELS[name])
    for parameter in model.parameters():  # zeros of an initialiser would hide a wrong weight
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.arange(10).view(2, 5)
    expected = logits(model, ids)

    with replaced_experts(model, ExpertsObserver(Shadow(), RunShape())):
        assert any("forward" in vars(module) for module in model.modules())
        found = logits(model, ids)

    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not any("forward" in vars(module) for module in model.modules())


def test_step_3_clamps_after_its_activation_in_the_replacement_too():
    config = Step3p7TextConfig(hidden_size=16, moe_intermediate_size=8, num_local_experts=4)
    parent = torch.nn.ModuleList([Step3p7Experts(config, swiglu_limit=0.1)])
    for parameter in parent.parameters():
        torch.nn.init.normal_(parameter)
    inputs = (torch.randn(6, 16), torch.randint(0, 4, (6, 2)), torch.rand(6, 2))
    expected = parent[0](*inputs)

    with replaced_experts(parent, ExpertsObserver(Shadow(), RunShape())):
        torch.testing.assert_close(parent[0](*inputs), expected)


def test_identity_experts_take_their_share_of_the_routing_and_multiply_nothing():
    trace = record(build("LongcatFlash", **MODELS["LongcatFlash"]), seq=14)
    calls = [op.experts for op, _ in trace.walk() if op.experts]

    # 14 tokens x 3 choices over 4 + 3 experts: 6 rows each, those of the last 3 computed by nobody
    assert {(call.experts, call.rows) for call in calls} == {(4, (6, 6, 6, 6))}


def test_llama_4_multiplies_every_expert_and_says_how_many_a_token_needs():
    trace = record(build("Llama4", **MODELS["Llama4"]), seq=8)
    calls = [op.experts for op, _ in trace.walk() if op.experts]

    assert {(call.experts, call.top_k, call.tokens, call.rows) for call in calls} == {(4, 1, 8, (8,) * 4)}
    # 2*m*k*n of gate and up, and of down: 8 tokens through each of 4 experts of width 160
    assert products(trace)["grouped"] == 2 * 8 * 4 * 64 * (2 * LLAMA["intermediate_size"] + LLAMA["intermediate_size"])


def test_every_replaced_class_exists():
    for path in REPLACEMENTS:
        module, _, name = path.rpartition(".")
        assert hasattr(__import__(module, fromlist=[name]), name)
