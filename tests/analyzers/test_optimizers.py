"""Optimiser states, by hand from shapes, and against optimisers that hold them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.optimization import Adafactor

from introspect.analyzers._optimizers import ITEMS, RECIPES, Trained, bytes_per_rank
from introspect.records import Parameter


def trained(*shape, dtype="bf16", hidden=False):
    return Trained(Parameter(path="w", shape=shape, dtype=dtype, touched=True), hidden_matrix=hidden)


@pytest.mark.parametrize(
    ("recipe", "one", "expected"),
    [
        # weights, gradients, master, first and second moment of [100, 200]
        ("adam", trained(100, 200), (40_000, 40_000, 80_000, 80_000, 80_000)),
        ("adam", trained(100, 200, dtype="fp32"), (80_000, 80_000, 0, 80_000, 80_000)),
        ("adam-bf16", trained(100, 200), (40_000, 40_000, 0, 40_000, 40_000)),
        # 20,000 bytes and 79 scales of 4 B: ceil(20000 / 256)
        ("adam-8bit", trained(100, 200), (40_000, 40_000, 80_000, 20_316, 20_316)),
        # below 4,096 elements a moment stays in fp32
        ("adam-8bit", trained(64), (128, 128, 256, 256, 256)),
        # 100 row and 200 column means
        ("adafactor", trained(100, 200), (40_000, 40_000, 80_000, 0, 1200)),
        ("adafactor", trained(64), (128, 128, 256, 0, 256)),
        ("adafactor", trained(8, 100, 200), (320_000, 320_000, 640_000, 0, 9600)),
        ("muon", trained(100, 200, hidden=True), (40_000, 40_000, 80_000, 80_000, 0)),
        ("muon", trained(100, 200), (40_000, 40_000, 80_000, 80_000, 80_000)),
    ],
)
def test_bytes_by_hand(recipe, one, expected):
    assert RECIPES[recipe].bytes([one]) == dict(zip(ITEMS, expected, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_table_without_gradient_is_weights_alone(recipe):
    table = Trained(Parameter(path="positions", shape=(10, 20), dtype="bf16", touched=True, frozen=True))

    assert RECIPES[recipe].bytes([table]) == dict.fromkeys(ITEMS, 0) | {"weights": 10 * 20 * 2}


def held(optimizer):
    """Bytes of the tensors that an optimiser keeps, step counters apart."""
    tensors = [
        t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor) and t.dim()
    ]
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("shape", [(10, 20), (3, 10, 20), (7,)])
@pytest.mark.parametrize(
    ("recipe", "make"),
    [
        ("adam", torch.optim.AdamW),
        ("adafactor", lambda parameters: Adafactor(parameters, lr=1e-3, relative_step=False, scale_parameter=False)),
    ],
)
def test_moments_are_those_of_the_optimisers(recipe, make, shape):
    parameter = torch.nn.Parameter(torch.ones(shape))
    optimizer = make([parameter])
    parameter.grad = torch.ones(shape)
    optimizer.step()
    bytes_ = RECIPES[recipe].bytes([trained(*shape, dtype="fp32")])

    assert held(optimizer) == bytes_["first_moment"] + bytes_["second_moment"]


def test_muon_keeps_one_moment_of_a_matrix():
    parameter = torch.nn.Parameter(torch.ones(10, 20))
    optimizer = torch.optim.Muon([parameter])
    parameter.grad = torch.ones(10, 20)
    optimizer.step()

    assert held(optimizer) == RECIPES["muon"].bytes([trained(10, 20, hidden=True)])["first_moment"]


@given(st.integers(1, 10**12), st.integers(1, 512), st.sampled_from(["zero1", "zero2", "zero3"]))
def test_shards_cover_the_whole(count, ranks, stage):
    states = dict.fromkeys(ITEMS, count)
    share = bytes_per_rank(states, stage, ranks)

    assert bytes_per_rank(states, stage, 1) == 5 * count
    assert share * ranks >= 5 * count
    assert share <= 5 * count


def test_each_stage_holds_less_than_the_one_before():
    states = RECIPES["adam"].bytes([trained(1000, 1000)])

    assert bytes_per_rank(states, "zero1", 8) > bytes_per_rank(states, "zero2", 8) > bytes_per_rank(states, "zero3", 8)
