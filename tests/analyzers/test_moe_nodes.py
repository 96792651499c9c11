"""Nodes that a token's experts lie on: by hand, against counting every choice, and as a router's ops say."""

from __future__ import annotations

from itertools import combinations

import pytest
from support.architectures import architecture

from introspect.analyzers._moe_balance import expert_calls
from introspect.analyzers._moe_nodes import Choice, choice_of, nodes_met
from introspect.analyzers._step import Step
from introspect.hooks.observe import observe
from introspect.hooks.shrink import IDENTITY, build_on_meta
from introspect.records import RunShape


def counted(choice: Choice, nodes: int) -> float:
    """The mean over every choice there is."""
    size, each = choice.experts // choice.groups, choice.experts // nodes
    found = [
        len({expert // each for expert in picked})
        for kept in combinations(range(choice.groups), choice.kept)
        for picked in combinations([g * size + e for g in kept for e in range(size)], choice.top_k)
    ]
    return sum(found) / len(found)


@pytest.mark.parametrize("nodes", [1, 2, 4, 8])
@pytest.mark.parametrize("choice", [Choice(8, 2), Choice(8, 3, 4, 2), Choice(16, 3, 4, 3), Choice(8, 2, 2, 1)])
def test_every_choice_counted(choice, nodes):
    assert nodes_met(choice, nodes) == pytest.approx(counted(choice, nodes))


def test_mixtral_on_two_nodes():
    assert nodes_met(Choice(8, 2), 2) == pytest.approx(11 / 7)  # C(4, 2) of C(8, 2) pairs miss a node: 2 x (1 - 6/28)


def test_groups_that_nodes_cut_across_count_for_nothing():
    assert nodes_met(Choice(24, 2, 8, 2), 3) == nodes_met(Choice(24, 2), 3)


@pytest.mark.parametrize(
    ("model_type", "choice"),
    [("deepseek_v3", Choice(256, 8, 8, 4)), ("mixtral", Choice(8, 2)), ("qwen3_moe", Choice(128, 8))],
)
@pytest.mark.parametrize("tokens", [4, 32])  # 32 tokens x 8 groups are as many as the experts
def test_a_routers_own_groups_are_found(model_type, choice, tokens):
    model = build_on_meta(*architecture(model_type, num_hidden_layers=4))
    step = Step(observe(model, IDENTITY, RunShape(seq=tokens)))
    (call, *_) = expert_calls(step.trace).values()

    assert choice_of(step.structure, call) == choice
