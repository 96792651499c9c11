from __future__ import annotations

from support.tiny import LLAMA, build

from introspect.hooks import perturb
from introspect.hooks.model_sizes import sizes_of
from introspect.hooks.perturb import Perturbed


def perturbed(name, raw, **sizes):
    model = build(name, **sizes)
    return Perturbed(type(model), model.config, {**LLAMA, **raw, **sizes})


def move_of(found, *path):
    (move,) = [move for move in found.moves if move.path == path]
    return move


def test_a_field_moves_alone_in_the_resolved_config():
    move = move_of(perturbed("Llama", {"model_type": "llama"}), "intermediate_size")

    assert (move.paths, move.in_raw, move.value) == ((("intermediate_size",),), False, 160)
    assert move.news == (161, 162, 320)


def test_lists_with_an_entry_for_each_layer_follow_their_count():
    kinds = ["sliding_attention", "full_attention"]
    found = perturbed("GptOss", {"model_type": "gpt_oss"}, num_local_experts=4, layer_types=kinds)

    assert move_of(found, "num_hidden_layers").paths == (("num_hidden_layers",), ("layer_types", "[]"))
    assert ("num_hidden_layers",) not in found.stuck


def test_a_field_that_a_derived_one_holds_in_place_moves_in_the_file():
    sizes = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 12, "v_head_dim": 10, "q_lora_rank": 24}
    few = {"num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    found = perturbed("DeepseekV3", {"model_type": "deepseek_v3"}, **sizes, **few)

    assert move_of(found, "qk_rope_head_dim").in_raw
    assert not move_of(found, "kv_lora_rank").in_raw


def test_a_field_that_only_the_file_knows_stands_for_those_the_class_makes_of_it():
    kinds = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    heads = {"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    found = perturbed("Gemma4", {"model_type": "gemma4_text"}, **kinds, **heads, hidden_size_per_layer_input=0)

    assert move_of(found, "global_head_dim").in_raw
    assert not [move for move in found.moves if "per_layer_config" in move.path]
    (place,) = [place for place, size in found.base.items() if place[0].endswith("1.self_attn.q_proj") and size == 128]
    assert found.look(True, {("global_head_dim",): 34})[place] == 4 * 34


def test_how_the_weights_are_stored_is_no_field_of_the_model():
    found = perturbed("Llama", {"model_type": "llama", "quantization_config": {"quant_method": "fp8", "bits": 8}})

    assert not [move for move in found.moves if "quantization_config" in move.path]
    assert move_of(found, "vocab_size").news == (513, 514, 1024)


SCALING = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
LONG = {"pad_token_id": 0, "num_key_value_heads": 4, "rope_parameters": SCALING}


def test_a_field_that_a_list_holds_in_proportion_moves_with_its_multiple():
    """Phi-3's rotary factors are half as many as a head is wide: 64 / 4 / 2."""
    move = move_of(perturbed("Phi3", {"model_type": "phi3"}, **LONG), "num_attention_heads")

    assert move.paths == (("num_attention_heads",), ("hidden_size",))
    assert move.to(5) == {("num_attention_heads",): 5, ("hidden_size",): 80}


def test_sizes_that_must_agree_move_in_proportion():
    """Mamba 2 asserts hidden_size * expand == num_heads * head_dim."""
    sizes = {"num_heads": 8, "head_dim": 16, "expand": 2, "state_size": 8, "n_groups": 1, "chunk_size": 8}
    found = perturbed("Mamba2", {"model_type": "mamba2"}, **sizes)

    assert move_of(found, "num_heads").paths == (("num_heads",), ("hidden_size",))
    assert found.stuck == []


def test_what_no_change_of_builds_is_stuck(monkeypatch):
    def refuse(model):
        if model.config.vocab_size != LLAMA["vocab_size"]:
            raise ValueError("no such vocabulary")
        return sizes_of(model)

    monkeypatch.setattr(perturb, "sizes_of", refuse)
    assert perturbed("Llama", {"model_type": "llama"}).stuck == [("vocab_size",)]


def test_each_change_is_built_once():
    found = perturbed("Llama", {"model_type": "llama"})
    before = found.builds

    assert found.look(False, {("vocab_size",): 513}) is found.look(False, {("vocab_size",): 513})
    assert found.builds == before
    assert found.look(False, {("hidden_size",): -1}) is None
