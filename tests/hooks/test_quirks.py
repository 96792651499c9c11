import pytest
from support.sources import LLAMA, source_of

from introspect.errors import BuildError
from introspect.hooks.build import build
from introspect.hooks.quirks import REPAIRS, repaired, unbuilt_predictors

MISTRAL = LLAMA | {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "sliding_window": 8,
    "head_dim": 16,
}
HUNYUAN = LLAMA | {
    "model_type": "hunyuan",
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "attention_head_dim": 32,
    "num_experts": 2,
    "moe_topk": 1,
}


def test_a_config_without_quirks_is_left_alone():
    config, notes = repaired(LLAMA)
    assert config == LLAMA
    assert config is not LLAMA
    assert notes == ()


def test_kernel_choices_are_dropped_silently():
    config, notes = repaired(LLAMA | {"_attn_implementation": "flash_attention_2", "attn_implementation": "x"})
    assert (config, notes) == (LLAMA, ())


def test_quantisers_are_left_out_of_the_whole_and_its_parts_and_it_says_so():
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    for raw in (LLAMA | quantised, LLAMA | {"text_config": {"hidden_size": 8} | quantised}):
        config, notes = repaired(raw)
        assert "quantization_config" not in str(config)
        assert notes == (
            "built without its quantization_config: bytes are the logical ones (stored: `introspect quant`)",
        )
    assert repaired(LLAMA | {"quantization_config": None})[1] == ()


def test_mistral_with_layer_types_is_ministral_whose_layers_differ():
    plain = build(source_of(MISTRAL))
    mixed = build(source_of(MISTRAL | {"layer_types": ["full_attention", "sliding_attention"]}))
    assert type(plain.module).__name__ == "MistralForCausalLM"
    assert type(mixed.module).__name__ == "MinistralForCausalLM"
    assert mixed.identity.notes[0] == REPAIRS["mistral"].note


def test_hunyuans_head_width_is_read_under_its_other_name():
    repaired_model = build(source_of(HUNYUAN))
    assert REPAIRS["hunyuan"].note in repaired_model.identity.notes
    assert repaired_model.module.model.layers[0].self_attn.q_proj.out_features == 4 * 32
    unread = {name: value for name, value in HUNYUAN.items() if name != "attention_head_dim"}
    with pytest.raises(BuildError, match="the config leaves head_dim empty"):
        build(source_of(unread))


def test_a_step_config_without_a_text_part_gives_its_sizes_to_the_text_model():
    flat = {"model_type": "step3p7", "num_hidden_layers": 3, "hidden_size": 64, "vocab_size": 100}

    config, notes = repaired(flat)

    assert config == {
        "model_type": "step3p7",
        "text_config": {"num_hidden_layers": 3, "hidden_size": 64, "vocab_size": 100},
    }
    assert notes == (REPAIRS["step3p7"].note,)
    assert repaired(config) == (config, ())


def test_layers_for_multi_token_prediction_that_no_class_builds_are_said():
    raw = {"text_config": {"mtp_num_hidden_layers": 1}, "num_nextn_predict_layers": 0}

    assert unbuilt_predictors(raw, ("model.layers.0",), "Qwen") == (
        "mtp_num_hidden_layers is 1: Qwen builds no multi-token prediction (MTP) layer, so none is counted",
    )
    assert unbuilt_predictors(raw, ("model.mtp.layers.0",), "Qwen") == ()
