"""Quantised checkpoints against the model: whole ones pass, and no part can be lost or changed unseen."""

import json
import re
import sys

import pytest
import torch
import transformers
from safetensors.torch import save_file
from support.checkpoints import save_tiny
from support.quantised_checkpoints import METHODS, config, tensors

from introspect import analyze
from introspect.hooks import quantised

BOTH = pytest.mark.parametrize("architecture", ["llama", "mixtral"])
EVERY = pytest.mark.parametrize("method", METHODS)
PART_NOT_NEEDED = ("g_idx", "weight_shape", "weight_format", "nested_absmax", "nested_quant_map", "nf4")
"""Parts that some writers leave out, and that readers do without."""


@pytest.fixture(autouse=True)
def packages(request):
    if "compressed" in request.node.name:
        pytest.importorskip("compressed_tensors", reason="the extra `quantised` brings it")


def check(folder, state, settings):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    result = analyze("check", str(folder))
    return result, list(result.tables["findings"].rows)


@BOTH
@EVERY
def test_a_whole_checkpoint_is_clean(method, architecture, tmp_path):
    result, rows = check(tmp_path / "m", tensors(method, architecture), config(method, architecture))

    assert (rows, result.findings) == ([], False)
    assert METHODS[method][1]["quant_method"] in " ".join(result.notes)


@BOTH
@EVERY
def test_every_lost_part_is_found_by_name(method, architecture, tmp_path):
    state = tensors(method, architecture)
    for name in [name for name in state if "o_proj" in name or ".w2." in name or "down_proj" in name]:
        if name.endswith(PART_NOT_NEEDED):
            continue
        _, rows = check(tmp_path / "m", {n: t for n, t in state.items() if n != name}, config(method, architecture))

        assert [row["tensor"] for row in rows if row["severity"] == "error"] == [name]


@EVERY
def test_a_matrix_of_another_shape_is_found(method, tmp_path):
    state = tensors(method)
    name = "model.layers.0.self_attn.k_proj"
    state |= {f"{name}.{part}": tensor for part, tensor in METHODS[method][0](256, 256).items()}

    _, rows = check(tmp_path / "m", state, config(method))

    assert rows[0]["kind"] == "shape"
    assert rows[0]["tensor"].startswith(name)


@pytest.mark.parametrize("method", ["gptq", "awq", "bnb8"])
def test_packed_matrices_are_shown_dense_and_as_stored(method, tmp_path):
    state = tensors(method)
    name = "model.layers.0.self_attn.k_proj"
    state |= {f"{name}.{part}": tensor for part, tensor in METHODS[method][0](256, 256).items()}

    _, rows = check(tmp_path / "m", state, config(method))

    assert rows[0]["expected"] == "[128, 256]"
    assert re.fullmatch(r"\[256, 256\] stored as int(8|32) \[\d+, \d+\]", rows[0]["found"])
    assert rows[0]["cause"] == "keys or values stored for all 4 query heads; the config groups them into 2"


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed"])
def test_parts_of_another_group_size_are_found(method, tmp_path):
    state = tensors(method)
    name = next(name for name in state if name.endswith(("o_proj.scales", "o_proj.weight_scale")))
    state[name] = state[name].repeat(3, 1)

    result, rows = check(tmp_path / "m", state, config(method))

    assert result.findings
    assert any("o_proj" in row["tensor"] for row in rows)


@EVERY
def test_without_its_quantization_config_the_parts_are_strangers_and_explained(method, tmp_path):
    settings = config(method)
    del settings["quantization_config"]

    result, rows = check(tmp_path / "m", tensors(method), settings)

    assert result.findings
    causes = " ".join(row["cause"] for row in rows)
    assert "transformers does not take" in causes or "another kind of number" in causes


def test_mxfp4_experts_are_turned_over(tmp_path):
    from safetensors.torch import load_file

    folder = save_tiny(tmp_path / "m", "GptOss", num_local_experts=4, head_dim=16)
    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, k, n = state.pop(name).shape
        state[f"{name}_blocks"] = torch.zeros(experts, n, k // 32, 16, dtype=torch.uint8)
        state[f"{name}_scales"] = torch.zeros(experts, n, k // 32, dtype=torch.uint8)
    settings = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}

    assert check(folder, state, settings)[1] == []
    lost = "model.layers.0.mlp.experts.down_proj_scales"
    _, rows = check(folder, {n: t for n, t in state.items() if n != lost}, settings)
    assert [(row["kind"], row["tensor"]) for row in rows] == [("packed_incomplete", lost)]


def test_a_quantiser_that_cannot_run_gives_way_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    monkeypatch.setitem(sys.modules, "compressed_tensors.compressors", None)

    result, rows = check(tmp_path / "m", tensors("compressed"), config("compressed"))

    assert rows == []
    assert "compressed-tensors: " in result.notes[1]
    assert "Error" in result.notes[1]


def test_a_method_that_transformers_does_not_have_is_taken_as_stored(tmp_path):
    settings = config("gptq") | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}

    result, _ = check(tmp_path / "m", tensors("gptq"), settings)

    assert result.findings
    assert "transformers has no quantiser of this name" in result.notes[1]


@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_fp8_is_what_transformers_itself_loads(architecture, tmp_path):
    """Its own load here, without a GPU, dequantises: then it accepts a matrix without scales, which we do not."""
    state, settings = tensors("fp8", architecture), config("fp8", architecture)
    model_class = getattr(transformers, settings["architectures"][0])
    scale = next(name for name in state if name.endswith("o_proj.weight_scale_inv"))
    for changed in (state, {n: t for n, t in state.items() if n != scale.removesuffix("_scale_inv")}):
        result, _ = check(tmp_path / "m", changed, settings)
        _, info = model_class.from_pretrained(tmp_path / "m", output_loading_info=True)

        assert result.findings == any(info.values())
    result, rows = check(tmp_path / "m", {n: t for n, t in state.items() if n != scale}, settings)
    assert [row["tensor"] for row in rows] == [scale]


def test_many_patterns_do_not_overflow_the_pattern_cache():
    before = re._MAXCACHE
    with quantised._wide_pattern_cache():
        assert before * 10 < re._MAXCACHE
    assert before == re._MAXCACHE


@pytest.mark.parametrize(
    ("settings", "method", "bits"),
    [
        ({"quant_method": "gptq", "bits": 3}, "gptq", 3),
        ({"load_in_4bit": True}, "bitsandbytes", None),
        ({"quant_method": "gptq", "bits": -4}, "gptq", None),
        ({"quant_method": "gptq", "bits": "4"}, "gptq", None),
        ({"quant_method": "x", "config_groups": {"a": {"weights": {"num_bits": 4}}}}, "x", 4),
        ({"quant_method": "x", "config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": None}}}, "x", 4),
        (
            {
                "quant_method": "x",
                "config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}},
            },
            "x",
            None,
        ),
        ({}, "unnamed", None),
    ],
)
def test_settings_are_read_without_trust(settings, method, bits):
    assert (quantised._method(settings), quantised._bits(settings)) == (method, bits)
