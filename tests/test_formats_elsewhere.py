"""Stored formats against torchao and hqq, which quantise real weights: same tensors, same bytes.

The extra `formats` installs both; they are no part of the extra `test`, since torchao writes to stderr in every process
that finds it. torchao's int4 layouts, MX and dynamic fp8 recipes need a GPU, so its tensor classes are asked directly.
"""

from __future__ import annotations

import pytest
import torch

from introspect.formats import Matrix, load_formats
from introspect.hooks.dtypes import dtype_name

FORMATS = load_formats()
ROWS, COLUMNS = 256, 512
MATRIX = Matrix(ROWS, COLUMNS)


@pytest.fixture
def torchao():
    return pytest.importorskip("torchao.quantization", reason="the extra `formats` is not installed")


@pytest.fixture
def weights():
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)


def ours(name):
    return {(t.shape[1:], t.dtype) for t in FORMATS[name].tensors(MATRIX)}


def parts(tensor):
    """Shape and dtype of what a torchao tensor holds. A scale of a whole matrix is [1] here and () or [1, 1] there."""
    names, _ = tensor.__tensor_flatten__()
    held = {name: getattr(tensor, name) for name in names}
    return {name: (tuple(part.shape), dtype_name(part.dtype)) for name, part in held.items() if part is not None}


def quantised(torchao, config, weights):
    layer = torch.nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16)
    layer.weight = torch.nn.Parameter(weights)
    model = torch.nn.Sequential(layer)
    torchao.quantize_(model, config)
    return model[0].weight


def test_fp8_with_a_scale_for_each_channel(torchao, weights):
    assert set(parts(quantised(torchao, torchao.Float8WeightOnlyConfig(), weights)).values()) == ours("fp8-channel")


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-block128"])
def test_fp8_of_other_granularities(torchao, weights, name):
    from torchao.quantization import PerBlock, PerTensor
    from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor

    granularity = PerTensor() if name == "fp8-tensor" else PerBlock([128, 128])
    assert set(parts(Float8Tensor.from_hp(weights, granularity=granularity)).values()) == ours(name)


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_int8_with_a_scale_for_each_channel_and_a_zero_point_that_is_always_zero(torchao, weights, config):
    tensor = quantised(torchao, getattr(torchao, config)(), weights)
    found = parts(tensor)

    assert found.pop("zero_point") == ((ROWS, 1), "int8")  # torchao's own: symmetric int8 has none
    assert not tensor.zero_point.any()
    assert set(found.values()) == ours("int8-channel")


def test_mxfp4(torchao, weights):
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    assert set(parts(MXTensor.to_mx(weights, torch.float4_e2m1fn_x2, 32)).values()) == ours("mxfp4")


def test_nvfp4_whose_second_scale_of_inputs_belongs_to_the_checkpoint(torchao, weights):
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    scale = per_tensor_amax_to_scale(weights.abs().max())
    found = parts(NVFP4Tensor.to_nvfp4(weights, per_tensor_scale=scale))

    assert found.pop("per_tensor_scale") == ((), "fp32")
    assert {*found.values(), ((2,), "fp32")} == ours("nvfp4")  # of weights and of inputs


def test_int4_of_hqq_in_groups_of_128(weights):
    hqq = pytest.importorskip("hqq.core.quantize", reason="the extra `formats` is not installed")
    layer = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    layer.weight = torch.nn.Parameter(weights.float())
    config = hqq.BaseQuantizeConfig(nbits=4, group_size=128, axis=1)
    stored = hqq.HQQLinear(layer, config, compute_dtype=torch.float16, device="cpu")
    tensors = (stored.W_q, stored.meta["scale"], stored.meta["zero"])

    assert {t.dtype for t in tensors} == {torch.uint8, torch.float16}
    expected = {t.role: t.bytes for t in FORMATS["int4-g128"].tensors(MATRIX)}
    assert [t.numel() * t.element_size() for t in tensors] == [expected[role] for role in ("packed", "scale", "zero")]
