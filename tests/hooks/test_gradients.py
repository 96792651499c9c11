from __future__ import annotations

import pytest
import torch
from support.tiny import IDENTITY, build, record
from torch import nn

from introspect.hooks.observe import observe
from introspect.records import RunShape


def train(module, **inputs):
    return observe(module.to("meta"), IDENTITY, RunShape(phase="train"), inputs=inputs)


def directions(trace):
    """(module, kind, direction) of every product, in order."""
    return [(op.module, g.kind, g.direction) for op in trace.ops for g in op.gemms]


class Shared(nn.Module):
    """One Linear used twice and a second one that reads the same input."""

    def __init__(self):
        super().__init__()
        self.once = nn.Linear(8, 8, bias=False)
        self.twice = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        h = self.once(x)
        return self.twice(self.twice(h)) * self.once(h)


def test_each_gradient_product_belongs_to_the_module_of_its_forward_op():
    found = directions(train(Shared(), x=torch.zeros(3, 8)))

    for module, calls in (("once", 2), ("twice", 2)):
        assert found.count((module, "linear", "forward")) == calls
        assert found.count((module, "linear", "dw")) == calls
    # The first call of `once` reads the input, whose gradient nobody asks for.
    assert found.count(("once", "linear", "dx")) == 1
    assert found.count(("twice", "linear", "dx")) == 2


class Cast(nn.Module):
    """A router: the weight is cast and scaled before it is multiplied."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 8, dtype=torch.bfloat16))
        self.inner = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return nn.functional.linear(self.inner(x), self.weight.float() * 0.5)


def test_a_cast_weight_is_still_the_weight():
    found = directions(train(Cast(), x=torch.zeros(3, 8)))

    assert [d for module, _, d in found if module == ""] == ["forward", "dw", "dx"]


class Scores(nn.Module):
    """Attention written out: two batched products of activations."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v


def test_both_gradients_of_two_activations_are_of_activations():
    found = directions(train(Scores(), x=torch.zeros(2, 5, 8)))

    assert found.count(("", "attention_qk", "forward")) == 1
    assert found.count(("", "attention_pv", "forward")) == 1
    assert found.count(("", "attention_qk", "dx")) == 2  # dQ and dK
    assert found.count(("", "attention_pv", "dx")) == 2  # dP and dV


@pytest.mark.parametrize("name", ["Llama", "Bloom"])
def test_no_gradient_op_is_left_without_a_module(name):
    trace = record(build(name), phase="train", seq=12)

    products = [op for op in trace.ops if op.backward and op.gemms]
    assert products
    assert all(op.module in trace.modules and op.module for op in products)


def test_shapes_of_both_gradients():
    trace = record(build("Llama"), phase="train", batch=2, seq=12)
    shapes = {
        g.direction: (g.m, g.k, g.n)
        for op in trace.ops
        for g in op.gemms
        if op.module == "model.layers.0.mlp.gate_proj"
    }

    # Y[24, 160] = X[24, 64] W^T;  dX[24, 64] = dY[24, 160] W;  dW[160, 64] = dY^T[160, 24] X.
    assert shapes == {"forward": (24, 64, 160), "dx": (24, 160, 64), "dw": (160, 24, 64)}


def test_weight_gradients_of_experts_sum_over_their_rows():
    # 2 x 5 tokens to 2 of 4 experts: 20 rows, 5 an expert; one more token makes rows that do not divide.
    for seq in (5, 11):
        trace = record(build("Mixtral", num_local_experts=4, num_experts_per_tok=2), phase="train", batch=2, seq=seq)
        flops = {}
        for op in trace.ops:
            for g in op.gemms:
                if g.kind == "grouped":
                    flops[g.direction] = flops.get(g.direction, 0) + g.flops

        # two layers, gate and up [160, 64] and down [64, 160]
        rows = 2 * 2 * seq
        assert flops == dict.fromkeys(("forward", "dx", "dw"), 2 * 2 * rows * (2 * 160 * 64 + 64 * 160))
