import pytest
from support.sources import LLAMA, source_of

from introspect.errors import BuildError, ConfigError, IntrospectError, UnknownArchitectureError
from introspect.hooks.architecture import choose

BERT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def refusal(error, config):
    """The one line that says why no class is chosen."""
    with pytest.raises(error) as caught:
        choose(source_of(config))
    assert isinstance(caught.value, IntrospectError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def chosen(config):
    architecture = choose(source_of(config))
    return architecture.model_class.__name__, type(architecture.config).__name__, architecture.notes


class TestWhichClass:
    def test_the_one_that_architectures_names(self):
        assert chosen(LLAMA) == ("LlamaForCausalLM", "LlamaConfig", ())
        assert chosen(LLAMA | {"architectures": ["LlamaModel"]}) == ("LlamaModel", "LlamaConfig", ())

    def test_the_causal_language_model_of_the_model_type_when_none_is_named(self):
        assert chosen(LLAMA | {"architectures": None})[0] == "LlamaForCausalLM"

    def test_a_wrapper_keeps_its_towers(self):
        config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
        assert chosen(config) == ("Gemma3ForConditionalGeneration", "Gemma3Config", ())

    def test_a_text_class_takes_the_text_part(self):
        config = {"model_type": "llama4", "architectures": ["Llama4ForCausalLM"]}
        assert chosen(config)[:2] == ("Llama4ForCausalLM", "Llama4TextConfig")

    def test_a_composite_without_a_named_class_is_its_text_part_and_says_so(self):
        name, config, notes = chosen({"model_type": "llama4"})
        assert (name, config) == ("Llama4ForCausalLM", "Llama4TextConfig")
        assert notes == (
            "architectures names no class; built as Llama4ForCausalLM, the text part of model_type 'llama4'",
        )

    def test_a_name_transformers_spells_otherwise(self):
        config = {"model_type": "phimoe", "architectures": ["PhiMoEForCausalLM"], "hidden_size": 64}
        assert chosen(config) == (
            "PhimoeForCausalLM",
            "PhimoeConfig",
            ("architectures names PhiMoEForCausalLM; built as PhimoeForCausalLM, the class of model_type 'phimoe'",),
        )

    def test_a_class_of_another_config_is_not_taken(self):
        config = {"model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForConditionalGeneration"]}
        assert chosen(config)[0] == "Qwen3_5MoeForCausalLM"

    def test_a_config_without_sizes_is_the_default_one_and_says_so(self):
        assert chosen({"model_type": "llama"}) == (
            "LlamaForCausalLM",
            "LlamaConfig",
            ("the config gives no sizes: they are the defaults of LlamaConfig",),
        )

    def test_a_class_for_images_and_text_when_there_is_no_other(self):
        assert chosen({"model_type": "mistral3"})[0] == "Mistral3ForConditionalGeneration"

    def test_an_encoder_decoder(self):
        assert chosen({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]})[0] == (
            "T5ForConditionalGeneration"
        )
        assert chosen({"model_type": "t5"})[0] == "T5ForConditionalGeneration"

    def test_names_that_are_no_model_class_are_passed_over(self):
        assert chosen(LLAMA | {"architectures": ["pipeline", "LlamaConfig", "LlamaModel"]})[0] == "LlamaModel"


class TestEncodersAsDecoders:
    def test_is_decoder_is_set_and_said(self):
        architecture = choose(source_of(BERT))
        assert architecture.model_class.__name__ == "BertLMHeadModel"
        assert architecture.config.is_decoder is True
        assert architecture.notes == ("is_decoder was false; set, since BertLMHeadModel decodes",)

    def test_a_masked_language_model_stays_an_encoder(self):
        architecture = choose(source_of(BERT | {"architectures": ["BertForMaskedLM"]}))
        assert (architecture.config.is_decoder, architecture.notes) == (False, ())


class TestUnknownModelType:
    def test_a_named_class_is_used_and_said(self):
        name, config, notes = chosen(DEEPSEEK | {"model_type": "kimi_k2", "num_nextn_predict_layers": 1})
        assert (name, config) == ("DeepseekV3ForCausalLM", "DeepseekV3Config")
        assert len(notes) == 1
        assert notes[0].startswith("model_type 'kimi_k2' is not in transformers ")
        assert notes[0].endswith(
            "built as DeepseekV3ForCausalLM, which architectures names (it does not read num_nextn_predict_layers)"
        )

    def test_without_a_model_type_at_all(self):
        assert chosen(DEEPSEEK)[0] == "DeepseekV3ForCausalLM"

    def test_a_class_whose_sizes_the_config_does_not_give_is_no_guess(self):
        config = {"model_type": "phi-msft", "architectures": ["PhiForCausalLM"], "n_embd": 2048, "n_layer": 24}
        message = refusal(UnknownArchitectureError, config)
        assert message.startswith("test.json: model_type 'phi-msft' (architecture 'PhiForCausalLM') is unknown: ")
        assert (
            "PhiForCausalLM would need hidden_size, num_hidden_layers, vocab_size, which the config does not" in message
        )

    def test_the_version_and_the_nearest_names_are_said(self):
        import transformers

        message = refusal(UnknownArchitectureError, {"model_type": "lama", "architectures": ["LamaForCausalLM"]})
        assert f"transformers {transformers.__version__} has no such class" in message
        assert "did you mean llama" in message
        assert message.endswith("a newer transformers may know it (pip install --upgrade transformers)")

    def test_code_of_the_repository_needs_trust(self):
        config = {"model_type": "zzz", "architectures": ["Zzz"], "auto_map": {"AutoModel": "modeling_z.Z"}}
        assert refusal(UnknownArchitectureError, config).endswith(
            "the model brings its own code (auto_map): read it, then pass --trust-remote-code with its folder or id"
        )


class TestRefusedConfigs:
    def test_a_field_of_the_wrong_type(self):
        message = refusal(ConfigError, LLAMA | {"hidden_act": 3})
        assert message == "test.json: config field 'hidden_act' is 3, expected str"

    def test_fields_that_do_not_fit_each_other(self):
        message = refusal(BuildError, LLAMA | {"hidden_size": 66})
        assert "LlamaConfig refuses the config: The hidden size (66) is not a multiple of the number of" in message
        assert message.endswith("; correct the config")

    def test_a_field_under_its_older_name(self):
        message = refusal(BuildError, LLAMA | {"rope_scaling": 3})
        assert "LlamaConfig refuses the config: Field 'rope_parameters' with value 3 doesn't match" in message

    def test_a_config_class_that_stumbles(self):
        message = refusal(BuildError, {"model_type": "t5", "feed_forward_proj": "a-b-c"})
        assert "cannot build the model: T5Config " in message
        assert "feed_forward_proj" in message

    def test_impossible_sizes(self):
        assert "config field 'vocab_size' is -1" in refusal(ConfigError, LLAMA | {"vocab_size": -1})


def test_the_spelling_transformers_gives_infinity_is_read():
    config = {"model_type": "mamba2", "time_step_limit": [0.0, {"__float__": "Infinity"}]}
    assert choose(source_of(config)).config.time_step_limit == [0.0, float("inf")]
