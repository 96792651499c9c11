from __future__ import annotations

import pytest
from support.tiny import LLAMA, build
from torch import nn

from introspect.errors import BuildError
from introspect.hooks.dimensions import gather_dimensions

LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 12, "v_head_dim": 10,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 20,
    "num_key_value_heads": 4, "first_k_dense_replace": 1, "num_hidden_layers": 3, "n_shared_experts": 3,
}  # fmt: skip


def terms(record, module, dimension):
    (found,) = {d for d in record.dimensions if d.module.endswith(module) and d.dimension == dimension}
    assert found.confirmed
    return found.terms


def test_llamas_dimensions_follow_from_its_fields():
    record = gather_dimensions(build("Llama"), {"model_type": "llama", **LLAMA})

    assert terms(record, "q_proj", "n") == ((1, ("head_dim", "num_attention_heads")),)
    assert terms(record, "k_proj", "n") == ((1, ("head_dim", "num_key_value_heads")),)
    assert terms(record, "gate_proj", "n") == ((1, ("intermediate_size",)),)
    assert terms(record, "embed_tokens", "rows") == ((1, ("vocab_size",)),)
    assert "max_position_embeddings" in record.still
    assert "num_hidden_layers" in record.structural


def test_a_width_that_a_derived_field_holds_in_place_is_moved_in_the_raw_file():
    raw = {"model_type": "deepseek_v3", **{**LLAMA, **LATENT}}
    record = gather_dimensions(build("DeepseekV3", **LATENT), raw)

    assert terms(record, "kv_a_proj_with_mqa", "n") == ((1, ("kv_lora_rank",)), (1, ("qk_rope_head_dim",)))
    both = ((1, ("num_attention_heads", "qk_nope_head_dim")), (1, ("num_attention_heads", "v_head_dim")))
    assert terms(record, "kv_b_proj", "n") == both
    assert terms(record, "experts.gate_up_proj", "n") == ((2, ("moe_intermediate_size",)),)
    assert terms(record, "shared_experts.gate_proj", "n") == ((1, ("moe_intermediate_size", "n_shared_experts")),)
    assert terms(record, "experts", "top_k") == ((1, ("num_experts_per_tok",)),)


def test_a_transposed_matrix_is_read_the_right_way():
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96}
    record = gather_dimensions(build("GPT2", **sizes), {"model_type": "gpt2", **sizes})

    assert terms(record, "mlp.c_fc", "k") == ((1, ("n_embd",)),)
    assert terms(record, "mlp.c_fc", "n") == ((1, ("n_inner",)),)
    assert terms(record, "attn.c_attn", "n") == ((3, ("n_embd",)),)


def test_a_module_without_a_config_is_refused():
    with pytest.raises(BuildError, match="no transformers model"):
        gather_dimensions(nn.Linear(2, 2), {})
