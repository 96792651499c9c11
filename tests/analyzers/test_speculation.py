"""Expected tokens, and steps scaled to any batch against steps recorded at that batch."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.traces import llama, moe_ffn

from introspect.analyzers._roofline import Machine, step_work, total_seconds
from introspect.analyzers._speculation import Draft, Speculation, decode_seconds, expected_tokens, part
from introspect.analyzers._step import Step
from introspect.gpus import find_gpus

(H100,) = find_gpus(("h100-sxm",))
MACHINE = Machine(gpu=H100)


def speculation(queries=5, **run):
    decode, verify = (Step(llama(phase="decode", seq=q, context=64, **run)) for q in (1, queries))
    return Speculation(decode=step_work(decode), verify=step_work(verify), queries=queries, machine=MACHINE)


def draft(cost):
    return Draft(name="", seconds=lambda batch: cost)


@given(st.floats(0, 1), st.integers(1, 16))
def test_expected_tokens_is_the_closed_form_and_lies_within_bounds(alpha, gamma):
    expected = expected_tokens(alpha, gamma)

    assert 1 <= expected <= gamma + 1
    if alpha < 1:
        assert expected == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha))


def test_expected_tokens_at_both_ends():
    assert expected_tokens(0, 4) == 1
    assert expected_tokens(1, 4) == 5


def test_expected_tokens_is_what_drawing_gives():
    draws = random.Random(0)
    steps, alpha, gamma = 20_000, 0.8, 4
    total = 0
    for _ in range(steps):
        accepted = next((i for i in range(gamma) if draws.random() > alpha), gamma)
        total += accepted + 1

    assert total / steps == pytest.approx(expected_tokens(alpha, gamma), rel=0.01)


@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("ffn", [None, lambda layer: moe_ffn(f"layers.{layer}.moe")])
def test_a_step_scaled_to_a_batch_is_the_step_recorded_at_it(batch, ffn):
    one, many = (Step(llama(phase="decode", seq=1, context=64, batch=b, ffn=ffn)) for b in (1, batch))

    assert decode_seconds(step_work(one), MACHINE)(batch) == pytest.approx(
        total_seconds(step_work(many), MACHINE), rel=1e-9
    )


@pytest.mark.parametrize("gamma", [1, 4, 7])
def test_a_verify_step_of_another_length_is_nearly_the_recorded_one(gamma):
    other = Step(llama(phase="decode", seq=gamma + 1, context=64, batch=2))

    # exact but for the pairs among the new tokens
    assert speculation().verify_seconds(2, gamma) == pytest.approx(total_seconds(step_work(other), MACHINE), rel=0.01)


def test_speedup_by_its_parts():
    case = speculation()
    expected = expected_tokens(0.8, 4) * case.decode_seconds(2) / (4 * 1e-6 + case.verify_seconds(2, 4))

    assert case.speedup(2, 4, 0.8, draft(1e-6)) == pytest.approx(expected)


def test_breakeven_is_the_first_batch_past_the_last_gain():
    case = speculation()
    batch = case.breakeven_batch(4, 0.5, draft(0.0))

    assert case.speedup(batch, 4, 0.5, draft(0.0)) <= 1 < case.speedup(batch - 1, 4, 0.5, draft(0.0))


def test_no_breakeven_where_nothing_gains_or_everything_does():
    assert speculation().breakeven_batch(4, 0.0, draft(1.0)) is None
    assert speculation().breakeven_batch(1, 1.0, draft(0.0)) is None


def test_a_layer_and_the_head_are_part_of_the_step():
    step = Step(llama(phase="decode", seq=1, context=64, layers=3))
    head, layer = part(step, layer=False), part(step, layer=True)

    assert [work.weights for work in head] == [("head.weight",)]
    assert {work.module.split(".")[1] for work in layer if work.module.startswith("layers")} == {"2"}
    assert total_seconds(layer, MACHINE) < total_seconds(step_work(step), MACHINE)
