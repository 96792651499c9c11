from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import introspect.hooks.attention  # noqa: F401  # registers the op


def tensors(heads=4, groups=2, length=5, keys=7, width=8, device="cpu"):
    torch.manual_seed(1)
    return [
        torch.randn(2, n, m, width, dtype=torch.float64, device=device, requires_grad=True)
        for n, m in ((heads, length), (groups, keys), (groups, keys))
    ]


def attend(q, k, v, mask=None, bias=None, sinks=None, softcap=0.0, causal=False):
    return torch.ops.introspect.attention(q, k, v, mask, bias, sinks, q.shape[-1] ** -0.5, softcap, 1, 1, causal)[0]


@pytest.mark.parametrize("kind", ["plain", "mask", "causal", "bias"])
def test_forward_and_gradients_equal_torchs_own(kind):
    q, k, v = tensors()
    mask = torch.ones(5, 7, dtype=torch.bool).tril(2)
    bias = torch.randn(1, 4, 5, 7, dtype=torch.float64)
    ours = {"plain": {}, "mask": {"mask": mask[None, None]}, "causal": {"causal": True}, "bias": {"bias": bias}}[kind]
    theirs = {"plain": None, "mask": mask, "causal": mask, "bias": bias}[kind]

    out = attend(q, k, v, **ours)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=theirs, enable_gqa=True).transpose(1, 2)

    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    for found, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_soft_cap_and_sinks_equal_the_written_out_formula():
    q, k, v = tensors(heads=2, groups=2)
    sinks = torch.tensor([0.3, -0.7], dtype=torch.float64, requires_grad=True)

    out = attend(q, k, v, sinks=sinks, softcap=5.0)
    scores = 5.0 * torch.tanh((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2) / 5.0)
    joined = torch.cat([scores, sinks.view(1, 2, 1, 1).expand(2, 2, 5, 1)], dim=-1)
    expected = (joined.softmax(-1)[..., :-1] @ v).transpose(1, 2)

    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    for found, want in zip(
        torch.autograd.grad(out.square().sum(), (q, k, v, sinks)),
        torch.autograd.grad(expected.square().sum(), (q, k, v, sinks)),
        strict=True,
    ):
        torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-4)


def test_meta_and_real_shapes_agree():
    real, meta = attend(*tensors()), attend(*tensors(device="meta"))

    assert real.shape == meta.shape == (2, 5, 4, 8)
    assert real.stride() == meta.stride()
