"""Settings of quantised checkpoints: which module gets which format."""

from __future__ import annotations

import pytest
from compressed_tensors.utils.match import is_match
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.quantizers.quantizers_utils import should_convert_module

from introspect.formats import load_formats
from introspect.quant_schemes import UnknownScheme, schemes, skip_rule

GROUP = {"weights": {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group", "symmetric": True}}


def read(settings, side_file=None, skips=("lm_head",)):
    return schemes(settings, side_file, skips, "bf16")


def chosen(scheme, *names):
    return [scheme.choose((name,)) is not None for name in names]


part = st.sampled_from(["model", "layers", "0", "1", "11", "mlp", "gate", "gate_proj", "experts", "lm_head"])
path = st.lists(part, min_size=1, max_size=5).map(".".join)
pattern = path | st.sampled_from(["mlp.gate", r"model.layers.*.mlp", "layers.1", r"re.*", "gate"])


@given(path, st.lists(pattern, max_size=4))
def test_lists_mean_what_they_mean_to_transformers(name, patterns):
    assert skip_rule(patterns)(name) is not should_convert_module(name, patterns)


@given(
    path,
    st.lists(path | st.sampled_from(["Linear", r"re:.*mlp.*", r"re:.*\.gate$"]), min_size=1, max_size=3),
    st.lists(path | st.sampled_from([r"re:.*gate.*", r"re:model"]), max_size=2),
)
def test_targets_mean_what_they_mean_to_compressed_tensors(name, targets, ignore):
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {**GROUP, "targets": targets}},
        "ignore": ignore,
    }

    expected = is_match(name, nn.Linear(1, 1), targets, ignore)

    assert chosen(read(settings), name) == [expected]


def test_fp8_keeps_what_is_listed_and_the_head():
    scheme = read({"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["mlp.gate"]})

    assert chosen(scheme, "layers.0.mlp.gate", "layers.0.mlp.gate_proj", "lm_head") == [False, True, False]
    assert scheme.choose(("layers.0.q",)) == load_formats()["fp8-block128"]


def test_one_of_several_names_is_enough_to_be_kept():
    scheme = read({"quant_method": "fp8", "modules_to_not_convert": ["language_model.model.layers.0"]})

    assert scheme.choose(("model.language_model.layers.0.q", "language_model.model.layers.0.q")) is None


def test_gptq_and_awq_take_bits_and_groups_from_the_settings():
    gptq = read({"quant_method": "gptq", "bits": 3, "group_size": -1})
    awq = read({"quant_method": "awq", "bits": 4, "group_size": 64})

    assert gptq.only_in_layers
    assert (gptq.choose(("h.0.q",)).bits, gptq.choose(("h.0.q",)).scale_block) == (3, (1, 0))
    assert awq.choose(("layers.0.q",)).scale_block == (1, 64)


def test_bitsandbytes_by_its_flags():
    four = read({"load_in_4bit": True, "bnb_4bit_use_double_quant": True})
    eight = read({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["q_proj"]})

    assert four.choose(("layers.0.q_proj",)) == load_formats()["nf4-dq"]
    assert chosen(eight, "layers.0.q_proj", "layers.0.k_proj", "lm_head") == [False, True, True]  # its own list only


def test_mixed_groups_of_compressed_tensors():
    fp8 = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    nvfp4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    settings = {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "a": {
                "targets": [r"re:.*attn.*"],
                "format": "float-quantized",
                "weights": fp8,
                "input_activations": {"dynamic": True},
            },
            "b": {
                "targets": ["Linear"],
                "format": "nvfp4-pack-quantized",
                "weights": nvfp4,
                "input_activations": {"dynamic": "local"},
            },
        },
    }
    scheme = read(settings)
    attention, ffn = scheme.choose(("layers.0.attn.q",)), scheme.choose(("layers.0.ffn.up",))

    assert (attention.element, attention.scale_block, attention.compute) == ("fp8_e4m3fn", (128, 128), "fp8")
    assert (ffn.scale, ffn.scale_block, ffn.extra, ffn.compute) == ("fp8_e4m3fn", (1, 16), {"fp32": 2}, "fp4")
    assert set(scheme.formats) == {r"re:.*attn.*", "Linear"}


@pytest.mark.parametrize(
    ("weights", "layout", "expected"),
    [
        (
            {"num_bits": 8, "type": "int", "strategy": "channel"},
            "int-quantized",
            {"element": "int8", "scale_block": (1, 0)},
        ),
        ({"num_bits": 8, "type": "float", "strategy": "tensor"}, "float-quantized", {"scale_block": (0, 0)}),
        (
            {"num_bits": 4, "type": "float", "group_size": 32},
            "mxfp4-pack-quantized",
            {"scale": "uint8", "scale_block": (1, 32)},
        ),
        (
            {"num_bits": 4, "type": "int", "group_size": 128, "symmetric": False},
            "pack-quantized",
            {"zero": "packed", "word": "int32"},
        ),
        ({"num_bits": 4, "type": "int", "group_size": 128, "actorder": "group"}, "pack-quantized", {"index": "int32"}),
    ],
)
def test_layouts_of_compressed_tensors(weights, layout, expected):
    settings = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"g": {"targets": ["Linear"], "weights": weights}},
    }
    found = read(settings).choose(("layers.0.q",))

    assert {name: getattr(found, name) for name in expected} == expected


def test_modelopt_reads_its_side_file():
    side = {
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head", "model.layers.0.self_attn*"],
        }
    }
    scheme = read(None, side)

    assert chosen(scheme, "lm_head", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj") == [
        False,
        False,
        True,
    ]
    assert scheme.kv_dtype == "fp8"


def test_modelopt_mixed_precision_names_what_it_quantises():
    settings = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "model.layers.0.mlp.experts": {"quant_algo": "W4A16_NVFP4"},
            "model.layers.0.q": {"quant_algo": "FP8"},
        },
    }
    scheme = read(settings)

    assert scheme.choose(("model.layers.0.mlp.experts.7.up_proj",)).compute is None
    assert scheme.choose(("model.layers.0.q",)).element == "fp8_e4m3fn"
    assert scheme.choose(("model.layers.0.k",)) is None


def test_a_side_file_goes_before_the_config():
    side = {
        "quantization": {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"layers.0.ffn.experts": {"quant_algo": "NVFP4"}},
        }
    }
    scheme = read({"quant_method": "fp8", "weight_block_size": [128, 128]}, side)

    assert scheme.method == "modelopt over fp8"
    assert scheme.choose(("layers.0.ffn.experts.3.w1",)).bits == 4
    assert scheme.choose(("layers.0.attn.q",)).bits == 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "aqlm"}, "quant_method 'aqlm' has no layout known here"),
        ({"bits": 4, "group_size": 64}, "quant_method 'unnamed' has no layout known here"),
        ({"quant_method": "modelopt", "quant_algo": "W3A3"}, "ModelOpt's quant_algo 'W3A3' has no layout known here"),
        ({"quant_method": "compressed-tensors"}, "without config_groups"),
        (
            {"quant_method": "compressed-tensors", "format": "x", "config_groups": {"g": {"weights": {"num_bits": 3}}}},
            "layout 'x' of 3-bit int has no size known here",
        ),
        ({"quant_method": "gptq", "bits": "four"}, "its settings cannot be read"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["("]}, "its settings cannot be read"),
    ],
)
def test_what_is_not_known_is_said(settings, message):
    with pytest.raises(UnknownScheme, match=message):
        read(settings)
