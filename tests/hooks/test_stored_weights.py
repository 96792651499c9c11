"""What quantised checkpoints store: against published totals, an index's bytes, and the libraries' modules on meta."""

from __future__ import annotations

from collections import Counter
from math import prod

import bitsandbytes
import pytest
import torch
from accelerate import init_empty_weights
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from support.tiny import build as tiny
from transformers import BitsAndBytesConfig
from transformers.integrations import replace_with_bnb_linear

from introspect.formats import Matrix, load_formats
from introspect.hooks import stored_weights as module
from introspect.hooks.build import build
from introspect.hooks.stored_weights import stored_weights
from introspect.sources import Source, resolve

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "dtype": "bfloat16",
}
TINY_MOE = {
    **TINY,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "head_dim": 64,
}


def source(config, settings, side_file=None):
    config = {**config, "quantization_config": settings} if settings else config
    return Source(
        id="tiny", kind="object", text="", config=config, config_sha256="", digest="", hf_quant_config=side_file
    )


def stored(where, roles=None):
    """Elements and bytes of everything the checkpoint holds, and the record; of some roles only where given."""
    native = stored_weights(where)
    assert native.problem is None
    quantised = {one.parameter: one for one in native.parameters}
    elements = count = 0
    for path, parameter in build(where).module.named_parameters():
        if path not in quantised:
            elements, count = elements + parameter.numel(), count + parameter.numel() * parameter.element_size()
            continue
        for tensor in quantised[path].tensors:
            if roles is None or tensor.role in roles:
                elements, count = elements + prod(tensor.shape), count + tensor.bytes
    return elements, count, native


# Elements as the Hub counts them (safetensors metadata of each repository).
@pytest.mark.parametrize(
    ("model", "published"),
    [
        ("Qwen/Qwen3-8B-FP8", 8191159296),  # fp8, 128 x 128 blocks: 8,190,735,360 weights and 423,936 scales
        ("ibm-granite/granite-3.3-8b-instruct-FP8", 8172462080),  # compressed-tensors, a scale for each channel
        pytest.param("Qwen/Qwen3-30B-A3B-FP8", 30533947392, marks=pytest.mark.sweep),  # stacked experts
        pytest.param("Qwen/Qwen3-235B-A22B-FP8", 235107904512, marks=pytest.mark.sweep),
    ],
)
def test_elements_equal_the_published_total(model, published):
    elements, _, native = stored(resolve(model))

    assert elements == published
    assert native.route == "modules of transformers' quantiser on meta"


@pytest.mark.parametrize(
    ("model", "published"),
    [
        ("nvidia/Qwen3-32B-NVFP4", 17159312384),  # two weights a byte; the Hub leaves scales out here
        pytest.param("nvidia/Qwen3-30B-A3B-NVFP4", 15583623168, marks=pytest.mark.sweep),
        pytest.param("nvidia/MiniMax-M2.7-NVFP4", 116349510656, marks=pytest.mark.sweep),
    ],
)
def test_packed_elements_equal_the_published_total(model, published):
    elements, _, native = stored(resolve(model), roles=("packed",))

    assert elements == published
    assert (native.method, native.kv_dtype) == ("modelopt", "fp8")


def test_gpt_oss_equals_its_published_size():
    _, count, native = stored(resolve("openai/gpt-oss-20b"))

    assert count == 13_761_264_768  # total_size of its index
    assert {one.parameter.rpartition(".")[2] for one in native.parameters} == {"gate_up_proj", "down_proj"}


LLAMA_8B = {**TINY, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
LLAMA_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}


def test_int8_of_bitsandbytes_equals_an_indexs_total_size():
    # A Llama-3-8B saved in 8 bits with everything else in fp32: its index says total_size 11188584672.
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    _, count, _ = stored(source({**LLAMA_8B, "dtype": "float32"}, settings))

    assert count == 11_188_584_672


def test_nf4_with_double_quantisation_equals_an_indexs_total_size():
    """LlavaNext-Video 7B as nf4-dq, kept in fp32 elsewhere, with LoRA matrices of rank 64 in fp32 beside the base.

    Its index says total_size 5534183646. What is left is the JSON text of 370 quant states, about 172 bytes each.
    """
    text = {**LLAMA_8B, "model_type": "mistral", "vocab_size": 32064, "max_position_embeddings": 32768}
    vision = {"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "image_size": 336}
    vision |= {"num_hidden_layers": 24, "num_attention_heads": 16, "patch_size": 14, "projection_dim": 768}
    config = {
        "architectures": ["LlavaNextVideoForConditionalGeneration"],
        "model_type": "llava_next_video",
        "text_config": {name: value for name, value in text.items() if name not in ("architectures", "dtype")},
        "vision_config": vision,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}
    _, count, native = stored(source(config, settings))
    language = 32 * ((4096 + 4096) * 2 + (4096 + 1024) * 2 + (4096 + 14336) * 3)  # N + K of the seven matrices
    adapters = 64 * (language + 24 * 3 * (1024 + 1024)) * 4  # of q, k and v in the vision tower

    assert len(native.parameters) == 370
    assert 150 < (5_534_183_646 - count - adapters) / 370 < 200


def test_awq_equals_a_published_file():
    zephyr = {**LLAMA_8B, "model_type": "mistral", "vocab_size": 32000, "dtype": "float16"}
    zephyr["architectures"] = ["MistralForCausalLM"]
    _, count, _ = stored(source(zephyr, {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}))

    assert count == pytest.approx(4.15e9, rel=1e-3)  # TheBloke/zephyr-7B-alpha-AWQ: one file of 4.15 GB


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def packed(settings, config=TINY):
    """Bytes of each parameter's tensors, by role and dtype."""
    found = {}
    for one in stored_weights(source(config, settings)).parameters:
        found[one.parameter] = Counter()
        for tensor in one.tensors:
            found[one.parameter][tensor.role, tensor.dtype] += tensor.bytes
    return found


def compressed(weights, layout, inputs=None):
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


CHANNEL = {"num_bits": 8, "strategy": "channel"}
TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    "settings",
    [
        FP8,
        compressed({**CHANNEL, "type": "float"}, "float-quantized", {**TOKEN, "type": "float"}),
        compressed({**CHANNEL, "type": "int"}, "int-quantized", {**TOKEN, "type": "int"}),
        compressed(
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True},
        ),
        compressed({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}, "pack-quantized"),
        compressed({"num_bits": 4, "type": "int", "group_size": 64, "actorder": "group"}, "pack-quantized"),
        compressed(
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
        ),
        compressed(
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
            "mxfp4-pack-quantized",
        ),
    ],
    ids=[
        "fp8",
        "c-t fp8",
        "c-t int8",
        "c-t fp8 block",
        "c-t int4",
        "c-t int4 order",
        "nvfp4",
        "mxfp4",
    ],
)
def test_settings_alone_give_the_tensors_of_the_quantisers_modules(settings, monkeypatch):
    by_modules = packed(settings)
    monkeypatch.setattr(module, "BY_MODULES", ())
    by_settings = packed(settings)

    assert len(by_modules) == 2 * 7
    assert by_settings == by_modules


def test_zero_points_are_what_compressing_a_real_matrix_gives():
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
    found = packed(compressed(weights, "pack-quantized"))["model.layers.0.self_attn.k_proj.weight"]
    state = {
        "weight": torch.zeros(128, 256, dtype=torch.bfloat16),
        "weight_scale": torch.ones(128, 8, dtype=torch.bfloat16),
        "weight_zero_point": torch.zeros(128, 8, dtype=torch.int8),
    }
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    real = PackedQuantizationCompressor.compress(state, scheme)

    assert found["zero", "int32"] == real["weight_zero_point"].numel() * 4
    assert sum(found.values()) == sum(tensor.numel() * tensor.element_size() for tensor in real.values())


def test_experts_are_quantised_one_by_one_under_their_checkpoints_names():
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
    settings = compressed(weights, "pack-quantized")
    settings["ignore"] = ["lm_head", "re:.*self_attn.*", r"re:.*experts\.3\..*"]
    found = packed(settings, TINY_MOE)

    # three of four experts: up and gate [256, 256] each, two scales a row, an int64 shape of two numbers
    assert found["model.layers.0.mlp.experts.gate_up_proj"] == {
        ("packed", "int32"): 3 * 2 * 256 * 256 // 2,
        ("scale", "bf16"): 3 * 2 * 256 * 2 * 2,
        ("extra", "int64"): 3 * 2 * 2 * 8,
    }
    assert not any("self_attn" in path for path in found)


def test_eight_bits_of_bitsandbytes_are_its_modules_tensors():
    with init_empty_weights(include_buffers=True):
        model = tiny("Llama")
        replaced = replace_with_bnb_linear(model, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    layer = replaced.model.layers[0].mlp.gate_proj
    format = load_formats()["int8-channel"]
    weight, scale = format.tensors(Matrix(160, 64))

    assert isinstance(layer, bitsandbytes.nn.Linear8bitLt)
    assert weight.shape[1:] == tuple(layer.weight.shape)
    # quantising gives one fp32 maximum a row (SCB)
    _, row_scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(torch.zeros(160, 64, dtype=torch.float16))
    assert (prod(scale.shape), row_scales.dtype) == (row_scales.numel(), torch.float32)


def test_four_bits_of_bitsandbytes_are_what_its_op_makes_on_meta():
    weight = torch.empty(160, 64, dtype=torch.bfloat16, device="meta")
    codes, maxima = torch.ops.bitsandbytes.quantize_4bit(weight, 64, "nf4", torch.uint8)
    packed_tensor, scale, table = load_formats()["nf4"].tensors(Matrix(160, 64))

    assert packed_tensor.bytes == codes.numel() * codes.element_size()
    assert scale.bytes == maxima.numel() * maxima.element_size()
    assert table.bytes == 16 * 4
    # double quantisation: the maxima in 8 bits, an fp32 maximum for 256 of them
    codes8, nested = torch.ops.bitsandbytes.quantize_blockwise(torch.zeros(maxima.numel()), torch.zeros(256), 256)
    _, scale8, second, tables = load_formats()["nf4-dq"].tensors(Matrix(160, 64))
    assert (scale8.bytes, second.bytes) == (codes8.numel(), nested.numel() * 4)
    assert tables.bytes == (16 + 256) * 4


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"quant_method": "aqlm"}, "quant_method 'aqlm' has no layout known here"),
        (
            {
                **compressed(CHANNEL, "int-quantized"),
                "config_groups": {"g": {"targets": ["re:.*ffn.*"], "weights": CHANNEL}},
            },
            "no module of the model fits re:.*ffn.*",
        ),
    ],
)
def test_what_cannot_be_told_is_said(settings, problem):
    native = stored_weights(source(TINY, settings))

    assert (native.parameters, native.problem) == ((), problem)


def test_targets_that_fit_nothing_are_named():
    settings = compressed(CHANNEL, "int-quantized")
    settings["config_groups"]["group_1"] = {"targets": ["re:.*ffn.*"], "weights": CHANNEL}
    settings["config_groups"]["group_0"]["targets"] = ["re:.*mlp.*"]

    assert stored_weights(source(TINY, settings)).notes == ("no module of the model fits re:.*ffn.*",)


def test_a_tied_head_stays():
    native = stored_weights(source({**TINY, "tie_word_embeddings": True}, FP8))

    assert not any("embed" in one.parameter or "head" in one.parameter for one in native.parameters)


def test_only_linears_are_taken_for_matrices():
    assert [dense.parameter for dense in module._dense(tiny("Llama", num_hidden_layers=1))][:2] == [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
    ]
