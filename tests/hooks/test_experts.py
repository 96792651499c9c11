from __future__ import annotations

import pytest
import torch

from introspect.hooks.experts import grouped_linear


def reference(x, w, bias, rows, transposed):
    parts, start = [], 0
    for expert, count in enumerate(rows):
        weight = w[expert] if transposed else w[expert].T
        part = x[start : start + count] @ weight
        parts.append(part if bias is None else part + bias[expert])
        start += count
    return torch.cat([*parts, x.new_zeros(len(x) - start, parts[0].shape[1])])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [(2, 0, 3), (1, 1, 1)])  # the second leaves rows to nobody
def test_each_block_meets_its_expert_forward_and_backward(transposed, with_bias, rows):
    torch.manual_seed(0)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(*((3, 4, 6) if transposed else (3, 6, 4)), dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, 6, dtype=torch.float64, requires_grad=True) if with_bias else None
    inputs = [t for t in (x, w, bias) if t is not None]

    out = grouped_linear(x, w, bias, list(rows), transposed, 5, 1)
    expected = reference(x, w, bias, rows, transposed)

    torch.testing.assert_close(out, expected)
    for found, want in zip(
        torch.autograd.grad(out.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(found, want)
