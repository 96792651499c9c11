from __future__ import annotations

import pytest
from support.architectures import architecture
from support.tiny import LLAMA, build
from torch import nn

from introspect.errors import BuildError
from introspect.hooks.dimensions import _Explainer, gather_dimensions
from introspect.hooks.fitting import evaluate
from introspect.hooks.perturb import Move
from introspect.hooks.shrink import build_on_meta, shrink

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


def test_a_fused_projection_with_a_derived_head_width_is_a_sum_of_quotients():
    record = gather_dimensions(build("Phi3", pad_token_id=0), {"model_type": "phi3", **LLAMA, "pad_token_id": 0})

    width = "hidden_size // num_attention_heads"
    queries, cached = (1, (width, "num_attention_heads")), (2, (width, "num_key_value_heads"))
    assert terms(record, "qkv_proj", "n") == (queries, cached)
    assert terms(record, "self_attn", "qk_head_dim") == ((1, (width,)),)


def test_heads_that_move_only_with_the_hidden_width_are_told_from_it():
    """Phi-3's rotary factors are half as many as a head is wide, so its width stays."""
    factors = {"short_factor": [1.0] * 32, "long_factor": [1.0] * 32}
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    sizes = {"hidden_size": 256, "pad_token_id": 0, "num_key_value_heads": 4, "rope_parameters": scaling}
    record = gather_dimensions(build("Phi3", **sizes), {"model_type": "phi3", **LLAMA, **sizes})

    assert record.joint == {"num_attention_heads": ("hidden_size",)}
    assert terms(record, "self_attn", "query_heads") == ((1, ("num_attention_heads",)),)
    width = "hidden_size // num_attention_heads"
    queries, cached = (1, (width, "num_attention_heads")), (2, (width, "num_key_value_heads"))
    assert terms(record, "qkv_proj", "n") == (queries, cached)


def test_every_expression_gives_the_size_of_the_model_as_it_is():
    heads = {"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0}
    raw = {"model_type": "gemma4_text", **LLAMA, **heads, **kinds}
    record = gather_dimensions(build("Gemma4", **heads, **kinds), raw)

    found = {(d.module.rpartition(".")[2], d.dimension, d.value): d for d in record.dimensions}
    assert found["q_proj", "n", 128].terms == ((1, ("global_head_dim", "num_attention_heads")),)
    assert found["k_proj", "n", 32].terms is not None
    assert all(evaluate(d.terms, raw) == d.value for d in record.dimensions if d.confirmed)
    assert {"global_head_dim", "num_global_key_value_heads"}.isdisjoint(record.still)


def test_fields_of_configs_inside_a_config_are_named_by_their_path():
    model_class, config = architecture("gemma3")
    small = shrink(model_class, config)
    record = gather_dimensions(build_on_meta(model_class, small), small.to_dict())

    fields = {name for d in record.dimensions for name in d.fields}
    assert {"text_config.hidden_size", "vision_config.hidden_size"} <= fields
    assert {"text_config.num_hidden_layers", "vision_config.num_hidden_layers"} <= set(record.structural)


def test_an_entry_of_a_list_is_named():
    sizes = {"hidden_size": 64, "ffn": [96, 160]}
    place = ("net", "n")
    record = _Explainer(_Listed(place, sizes)).record()

    assert record.dimensions[0].terms == ((1, ("ffn[1]",)),)


class _Listed:
    """A model whose matrix is as wide as the second entry of a list."""

    def __init__(self, place, sizes):
        self.base, self._sizes, self.stuck, self.builds = {place: sizes["ffn"][1]}, sizes, [], 0
        self.values = {("ffn",): min(sizes["ffn"])}
        self.moves = [Move((("ffn",),), False, 96, (120, 132, 192))]

    def entries(self, move):
        return tuple(self._sizes["ffn"])

    def look(self, in_raw, changes):
        new = changes.get(("ffn",), 96)
        return {place: size * new // 96 for place, size in self.base.items()}


def test_a_module_without_a_config_is_refused():
    with pytest.raises(BuildError, match="no transformers model"):
        gather_dimensions(nn.Linear(2, 2), {})
