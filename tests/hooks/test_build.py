import copy
import csv
import json
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sources import LLAMA, source_of
from torch import nn

from introspect import catalog
from introspect.errors import BuildError, ConfigError, IntrospectError, OptionError
from introspect.hooks.build import BF16_ASSUMED, build
from introspect.hooks.dtypes import torch_dtype
from introspect.sources import resolve

MODELS = Path(__file__).parents[3] / "shared" / "models"

PUBLISHED_TOTALS = {
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,  # 32 x 218,112,000 + 2 x 525,336,576 + 4,096
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "openai/gpt-oss-20b": 20_914_757_184,
    "google/gemma-2-2b": 2_614_341_888,  # tied: the head is not counted twice
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "bigscience/bloom-7b1": 7_069_016_064,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "nvidia/Nemotron-H-56B-Base-8K": 56_324_350_464,
    "LiquidAI/LFM2-1.2B": 1_170_340_608,
    "Qwen/Qwen3-VL-8B-Instruct": 8_767_123_696,  # the image tower included
    "tencent/Hunyuan-A13B-Instruct": 80_393_183_232,
}

DEEPSEEK = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "vocab_size": 64,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
}


def parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


def tensors(module):
    return [*module.parameters(), *module.buffers()]


def exact_rows():
    if not MODELS.is_dir():
        return []
    with open(MODELS / "MODELS.tsv", encoding="utf-8", newline="") as table:
        rows = csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [row for row in rows if row["check"] == "EXACT"]


class TestTotals:
    @pytest.mark.parametrize(("model", "total"), PUBLISHED_TOTALS.items())
    def test_the_published_parameter_total(self, model, total):
        assert parameters(build(resolve(model)).module) == total

    @pytest.mark.sweep
    @pytest.mark.skipif(not MODELS.is_dir(), reason="the shared folder is not beside this checkout")
    def test_every_config_marked_exact_gives_its_published_total(self):
        rows = exact_rows()
        built = {row["file"]: parameters(build(resolve(str(MODELS / "configs" / row["file"]))).module) for row in rows}
        assert len(rows) == 86
        assert built == {row["file"]: int(row["published_total"]) for row in rows}

    @pytest.mark.sweep
    @pytest.mark.parametrize("entry", catalog.entries(), ids=lambda entry: entry.id)
    def test_every_catalog_row_states_the_class_and_total_that_are_built(self, entry):
        built = build(resolve(entry.id))
        assert built.identity.class_name == entry.class_name
        assert parameters(built.module) == entry.params
        assert all(tensor.is_meta for tensor in tensors(built.module))


class TestIdentity:
    def test_it_says_what_was_built_and_from_where(self):
        source = resolve("Qwen/Qwen2.5-0.5B")
        identity = build(source).identity
        assert (identity.id, identity.class_name) == ("Qwen/Qwen2.5-0.5B", "Qwen2ForCausalLM")
        assert (identity.source, identity.config_sha256) == (source.text, source.config_sha256)
        assert identity.config == source.config
        assert identity.notes == ()

    def test_a_quantised_model_is_built_logically_and_keeps_its_raw_config(self):
        built = build(resolve("Qwen/Qwen3-8B-FP8"))
        assert parameters(built.module) == 8_190_735_360
        assert {type(m) for m in built.module.modules() if isinstance(m, nn.Linear)} == {nn.Linear}
        assert {parameter.dtype for parameter in built.module.parameters()} == {torch.bfloat16}
        assert built.identity.config["quantization_config"]["quant_method"] == "fp8"
        assert built.identity.notes == (
            "built without its quantization_config: bytes are the logical ones (stored: `introspect quant`)",
        )

    def test_the_quantisers_own_file_is_carried_beside_the_raw_config(self):
        built = build(source_of(LLAMA, hf_quant_config={"quantization": {"quant_algo": "NVFP4"}}))
        assert built.identity.config["hf_quant_config"] == {"quantization": {"quant_algo": "NVFP4"}}

    def test_a_class_named_by_architectures_alone_says_so(self):
        built = build(resolve("moonshotai/Kimi-K2-Instruct"))
        assert built.identity.class_name == "DeepseekV3ForCausalLM"
        assert any("model_type 'kimi_k2' is not in transformers" in note for note in built.identity.notes)
        assert parameters(built.module) == 1_026_408_209_408


class TestAsLoaded:
    def test_everything_is_on_meta_in_evaluation_mode(self):
        module = build(source_of(LLAMA)).module
        assert all(tensor.is_meta for tensor in tensors(module))
        assert not any(part.training for part in module.modules())

    def test_tied_weights_are_one_parameter(self):
        module = build(source_of(LLAMA | {"tie_word_embeddings": True})).module
        assert module.lm_head.weight is module.model.embed_tokens.weight

    def test_deepseek_v3_in_bf16_keeps_its_router_in_fp32(self):
        module = build(resolve("deepseek-ai/DeepSeek-V3")).module
        total = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
        assert total == 1_342_265_669_632  # 2 x 671,026,404,352 + 2 more for each of 58 x 256 x 7,168 router weights
        kept = {name.split(".")[-2:][0] for name, p in module.named_parameters() if p.dtype == torch.float32}
        assert kept == {"gate"}

    @pytest.mark.parametrize("config", [LLAMA, DEEPSEEK, GPT_OSS], ids=lambda config: config["model_type"])
    @pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
    def test_every_tensor_has_the_dtype_of_a_real_load(self, tmp_path, config, dtype):
        model_class = getattr(transformers, config["architectures"][0])
        settings = {name: value for name, value in config.items() if name != "model_type"}
        model_class(model_class.config_class(**settings)).save_pretrained(tmp_path)
        real = model_class.from_pretrained(tmp_path, dtype=torch_dtype(dtype))
        built = build(source_of(config), dtype=dtype).module
        expected = {name: (tensor.dtype, tensor.shape) for name, tensor in real.state_dict().items()}
        assert {name: (tensor.dtype, tensor.shape) for name, tensor in built.state_dict().items()} == expected


class TestDtype:
    def test_the_configs_own(self):
        built = build(source_of(LLAMA | {"torch_dtype": "float16"}))
        assert (built.dtype, built.assumptions) == ("fp16", ())
        assert built.module.lm_head.weight.dtype == torch.float16

    def test_that_of_the_text_part_when_the_whole_names_none(self):
        config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
        built = build(source_of(config | {"text_config": {"dtype": "float16"}}))
        assert (built.dtype, built.assumptions) == ("fp16", ())

    @pytest.mark.parametrize("nothing", [{}, {"torch_dtype": None}, {"dtype": "auto"}])
    def test_bf16_is_assumed_and_said_when_none_is_named(self, nothing):
        built = build(source_of(LLAMA | nothing))
        assert (built.dtype, built.assumptions) == ("bf16", (BF16_ASSUMED,))
        assert built.module.lm_head.weight.dtype == torch.bfloat16

    @pytest.mark.parametrize("spelling", ["fp32", "float32", "torch.float32", "float"])
    def test_the_one_asked_for_wins(self, spelling):
        built = build(source_of(LLAMA | {"torch_dtype": "float16"}), dtype=spelling)
        assert (built.dtype, built.assumptions) == ("fp32", ())
        assert built.module.lm_head.weight.dtype == torch.float32

    @pytest.mark.parametrize("dtype", ["fp8", "int8", "bfloat", "", "float8_e4m3fn"])
    def test_one_that_no_module_computes_in(self, dtype):
        with pytest.raises(OptionError) as caught:
            build(source_of(LLAMA), dtype=dtype)
        assert str(caught.value) == f"--dtype: got {dtype!r}, expected one of bf16, fp16, fp32, fp64"

    @pytest.mark.parametrize("dtype", ["int8", "nonsense", "float8_e4m3fn"])
    def test_a_config_that_names_such_a_one(self, dtype):
        with pytest.raises(ConfigError) as caught:
            build(source_of(LLAMA | {"torch_dtype": dtype}))
        assert str(caught.value) == (
            f"test.json: config field 'torch_dtype' is {dtype!r}, expected one of bf16, fp16, fp32, fp64"
        )


class TestRefused:
    def test_the_fields_a_constructor_missed_are_named(self):
        config = LLAMA | {"model_type": "ministral", "architectures": ["MinistralForCausalLM"]}
        with pytest.raises(BuildError) as caught:
            build(source_of(config))
        assert str(caught.value) == (
            "test.json: cannot build the model: MinistralForCausalLM raised TypeError: unsupported operand type(s) for "
            "** or pow(): 'NoneType' and 'float' (the config leaves head_dim empty); correct the config"
        )

    @pytest.mark.parametrize(
        ("fields", "name"),
        [({"hidden_act": "swishy"}, "hidden_act"), ({"rope_scaling": {"type": "swishy"}}, "rope_scaling.type")],
    )
    def test_the_field_whose_value_is_not_known_is_named(self, fields, name):
        with pytest.raises(BuildError) as caught:
            build(source_of(LLAMA | fields))
        assert str(caught.value) == (
            "test.json: cannot build the model: LlamaForCausalLM raised KeyError: 'swishy' "
            f"(the value of {name}); correct the config"
        )

    def test_sizes_that_overflow_together(self):
        huge = {"hidden_size": 2**28, "intermediate_size": 2**28, "num_local_experts": 100_000}
        config = LLAMA | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]} | huge
        with pytest.raises(BuildError) as caught:
            build(source_of(config))
        assert str(caught.value).startswith(
            "test.json: cannot build the model: MixtralForCausalLM raised RuntimeError: "
        )
        assert "\n" not in str(caught.value)

    def test_a_tower_of_a_package_that_is_not_installed(self, monkeypatch):
        def missing(*args, **kwargs):
            raise ImportError("LlamaForCausalLM requires the\n timm library")

        monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", missing)
        with pytest.raises(BuildError) as caught:
            build(source_of(LLAMA))
        assert str(caught.value) == (
            "test.json: cannot build the model: LlamaForCausalLM requires the timm library; install what it needs"
        )

    def test_the_library_says_nothing_on_stderr_and_keeps_its_verbosity(self, capfd):
        build(source_of(LLAMA))  # whatever imports have to say is not about this config
        capfd.readouterr()
        before = transformers.logging.get_verbosity()
        build(source_of(LLAMA | {"bos_token_id": 10**6}))
        assert capfd.readouterr() == ("", "")
        assert transformers.logging.get_verbosity() == before


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
FIELDS = (*LLAMA, "head_dim", "hidden_act", "rope_scaling", "torch_dtype", "pad_token_id", "text_config", "layer_types")


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FIELDS), JSON, st.sampled_from([LLAMA, GPT_OSS]))
def test_any_value_in_any_field_builds_or_is_refused_in_one_line(field, value, config):
    assert "\n" not in refusal_of(config | {field: value})


def refusal_of(config):
    """Why a file with this config is refused, "" when it is built. Any other kind of error is the test's failure."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        try:
            build(resolve(str(path)))
        except IntrospectError as error:
            return str(error)
    return ""


class Net(nn.Module):
    """Awkward on purpose: a tie, a buffer, a frozen parameter, a tensor that is neither."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.mask = torch.ones(2, 2)
        self.derived = self.frozen * self.head.weight.sum()  # part of a graph: deepcopy alone refuses it
        self.register_buffer("steps", torch.arange(3))

    def forward(self, ids):
        return self.head(self.embedding(ids))


class TestModules:
    def test_a_copy_on_meta_that_leaves_the_module_as_it_was(self):
        module = Net().train()
        before = copy.deepcopy(module.state_dict())
        built = build(module, inputs={"ids": torch.tensor([1])})
        assert all(tensor.is_meta for tensor in [*tensors(built.module), built.module.mask, built.module.derived])
        assert built.module.head.weight is built.module.embedding.weight
        assert (built.module.frozen.requires_grad, built.module.head.weight.requires_grad) == (False, True)
        assert built.inputs["ids"].tolist() == [1]
        assert module.training
        assert not built.module.training
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())

    def test_it_is_named_by_its_class(self):
        built = build(Net())
        assert (built.identity.id, built.identity.class_name, built.identity.source) == ("Net", "Net", "module Net")
        assert (built.identity.config, built.config, built.dtype) == ({}, None, "fp32")

    def test_a_dtype_asked_for(self):
        module = Net()
        assert build(module, dtype="bf16").module.frozen.dtype == torch.bfloat16
        assert module.frozen.dtype == torch.float32

    def test_a_transformers_model_brings_its_config(self):
        config = transformers.LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"})
        module = transformers.LlamaForCausalLM(config)
        built = build(module)
        assert built.config is built.module.config is not module.config
        assert built.identity.config["hidden_size"] == 64

    def test_no_weight_is_copied_on_the_way(self):
        module = nn.Linear(2**16, 2**16, bias=False, device="meta")  # 17 GB if it were real
        assert build(module).module.weight.shape == (2**16, 2**16)

    def test_a_module_that_cannot_be_copied_says_what_to_give_instead(self):
        module = Net()
        module.lock = threading.Lock()
        with pytest.raises(BuildError) as caught:
            build(module)
        assert str(caught.value) == (
            "Net: cannot build the model: it cannot be copied: TypeError: cannot pickle '_thread.lock' object; "
            "give a factory that builds it instead (file.py:factory)"
        )

    def test_a_lazy_module_must_have_run(self):
        with pytest.raises(BuildError, match="it has a lazy module whose shapes are not known; run it once before"):
            build(nn.Sequential(nn.LazyLinear(3)))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "diffllama", "architectures": ["DiffLlamaForCausalLM"], "num_hidden_layers": 1},
        {"model_type": "xlnet", "architectures": ["XLNetLMHeadModel"], "n_layer": 1},
    ],
    ids=["torch.normal", "torch.FloatTensor"],
)
def test_parameters_of_every_constructor_lie_on_meta_in_the_asked_dtype(config):
    module = build(source_of(config), dtype="bf16").module

    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.bfloat16)}
