from __future__ import annotations

import pytest
import torch
from support.tiny import IDENTITY, build, record
from torch import nn

from introspect.hooks.observe import observe
from introspect.records import RunShape

BLOOM = {"hidden_size": 64, "n_head": 4, "n_layer": 2}


def calls(trace):
    return [op.attention for op, _ in trace.walk() if op.attention]


def test_a_model_outside_the_interface_keeps_heads_and_pairs():
    trace = record(build("Bloom", **BLOOM), batch=3, seq=10)

    assert {(c.query_heads, c.kv_heads, c.visible_pairs, c.causal) for c in calls(trace)} == {(4, 4, 3 * 55, True)}
    assert {g.kind for op, _ in trace.walk() for g in op.gemms} == {"linear", "attention_qk", "attention_pv"}


def test_expanded_keys_are_counted_as_the_heads_that_are_stored():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv = nn.Linear(32, 32), nn.Linear(32, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.q(x).view(2, 6, 4, 8).transpose(1, 2)
            k = self.kv(x)[:, None].expand(2, 4, 6, 8)
            return (q @ k.transpose(2, 3)).softmax(-1) @ k

    (call,) = calls(observe(Shared().to("meta"), IDENTITY, RunShape(batch=2), inputs={"x": torch.zeros(2, 6, 32)}))

    assert (call.query_heads, call.visible_pairs, call.causal) == (4, 2 * 36, False)


class Masked(nn.Module):
    """The mask depends on a parameter: nothing can tell what it lets through."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.transpose(1, 2) + self.mask(x)).softmax(-1) @ x


def test_an_unreadable_mask_is_dense_and_said_to_be_assumed():
    trace = observe(Masked().to("meta"), IDENTITY, RunShape(), inputs={"x": torch.zeros(1, 6, 8)})

    assert calls(trace)[0].visible_pairs == 36
    assert "not readable: every pair counted visible" in trace.assumptions[0]


@pytest.mark.parametrize("name", ["Roberta", "RoFormer"])
def test_encoders_attend_in_both_directions(name):
    trace = record(build(name, max_position_embeddings=64), seq=8)

    assert {c.visible_pairs for c in calls(trace)} == {64}
