from __future__ import annotations

from collections import Counter

import pytest
from support.tiny import IDENTITY, build, products

from introspect.hooks import observe as observe_module
from introspect.hooks.observe import observe
from introspect.records import Repeat, RunShape

SCANNING = {
    "Mamba": {"state_size": 4, "num_hidden_layers": 2},
    "Jamba": {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2, "expert_layer_period": 2,
              "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2, "use_mamba_kernels": False,
              "mamba_d_state": 4, "pad_token_id": 0},
    "Qwen3Next": {"num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                  "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
}  # fmt: skip
LENGTHS = {"Mamba": 121, "Jamba": 97, "Qwen3Next": 1600}


def summary(trace):
    kinds: Counter[str] = Counter()
    for op, times in trace.walk():
        kinds[op.kind] += times
    return {
        "flops": products(trace),
        "kinds": kinds,
        "pairs": sum(op.attention.visible_pairs * times for op, times in trace.walk() if op.attention),
        "rows": [op.experts.rows for op, _ in trace.walk() if op.experts],
        "cache": [(c.name, c.shape_before, c.shape_after) for c in trace.cache],
    }


@pytest.mark.parametrize("name", SCANNING)
def test_a_folded_run_is_the_direct_run_to_the_integer(name):
    model = build(name, **SCANNING[name])
    run = RunShape(seq=LENGTHS[name], batch=2)

    folded = observe(model, IDENTITY, run)
    direct = observe_module._observe(model, IDENTITY, run, None, (), None)

    assert any(isinstance(node, Repeat) for node in folded.ops)
    assert not any(isinstance(node, Repeat) for node in direct.ops)
    assert summary(folded) == summary(direct)


def test_long_prompts_of_recurrent_models_stay_small():
    trace = observe(build("Mamba", **SCANNING["Mamba"]), IDENTITY, RunShape(seq=100_000))

    assert len(trace.ops) < 1000
    assert sum(times for _, times in trace.walk()) > 1_000_000


def test_steps_of_a_scan_are_products_of_their_own_kind():
    trace = observe(build("Mamba", **SCANNING["Mamba"]), IDENTITY, RunShape(seq=8))

    # 8 steps x 2 layers: state [160, 4] times the token's C [4]
    assert products(trace)["scan"] == 8 * 2 * 2 * 160 * 4
