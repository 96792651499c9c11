from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tiny import build

from introspect.hooks.session import session
from introspect.hooks.shadow import Shadow
from introspect.records import RunShape


@pytest.fixture
def observed():
    with session(torch.nn.Linear(1, 1, device="meta"), RunShape()) as found:
        yield found


def known(observed, value: torch.Tensor) -> torch.Tensor:
    return observed.shadow.give(torch.empty_like(value, device="meta"), value)


def test_a_value_that_follows_from_inputs_is_computed(observed):
    x = known(observed, torch.arange(6).view(2, 3))

    assert (x.T[1:] * 2 + 1).sum().item() == (torch.arange(6).view(2, 3).T[1:] * 2 + 1).sum().item()
    assert [d.answered for d in observed.shadow.decisions] == ["value"]


def test_in_place_writes_through_views_change_their_base_and_not_the_past(observed):
    x = known(observed, torch.zeros(3, 4, dtype=torch.int64))
    before = x + 0
    x[1:, 2].add_(7)
    x.t()[0].fill_(5)

    expected = torch.zeros(3, 4, dtype=torch.int64)
    expected[1:, 2].add_(7)
    expected.t()[0].fill_(5)
    assert x.tolist() == expected.tolist()
    assert before.tolist() == torch.zeros(3, 4).tolist()


def test_factories_are_known_and_random_numbers_are_not(observed):
    assert torch.arange(4, device="meta").tolist() == [0, 1, 2, 3]
    assert observed.shadow.value(torch.rand(4, device="meta")) is None


def test_a_value_from_weights_is_assumed_and_says_where(observed):
    weight = torch.rand(2, device="meta")  # as unknown as any weight

    assert bool((weight > 0).any()) is False
    (decision,) = observed.shadow.decisions
    assert (decision.question, decision.answer, decision.answered) == ("Tensor.item", "False", "assumed")
    assert decision.where.startswith("hooks/test_shadow.py:")


def test_shapes_that_depend_on_values_follow(observed):
    x = known(observed, torch.tensor([3, 0, 5, 0, 1]))

    assert torch.nonzero(x).shape == (3, 1)
    assert x[x > 0].tolist() == [3, 5, 1]
    assert torch.unique(x).shape == (4,)


def test_a_shape_that_nothing_tells_is_an_error_with_the_line(observed):
    weight = torch.rand(4, device="meta")

    with pytest.raises(NotImplementedError, match=r"torch.unique at hooks/test_shadow.py:\d+ needs the values"):
        torch.unique(weight)


@given(st.lists(st.sampled_from(["add", "mul", "flip", "cumsum", "t", "slice"]), max_size=8))
def test_chains_of_ops_evaluate_as_on_the_cpu(chain):
    steps = {
        "add": lambda x: x.add_(3),
        "mul": lambda x: x * 2,
        "flip": lambda x: x.flip(0),
        "cumsum": lambda x: x.cumsum(0),
        "t": lambda x: x.t(),
        "slice": lambda x: x[1:] if len(x) > 1 else x,
    }
    real = torch.arange(12).view(3, 4)
    with session(torch.nn.Linear(1, 1, device="meta"), RunShape()) as observed:
        meta = known(observed, real.clone())
        real = real.clone()
        for name in chain:
            meta, real = steps[name](meta), steps[name](real)
        assert meta.tolist() == real.tolist()


def test_a_long_chain_of_writes_needs_no_recursion(observed):
    x = known(observed, torch.zeros(1, dtype=torch.int64))
    for _ in range(3000):
        x.add_(1)

    assert x.item() == 3000


def test_nothing_is_computed_unless_asked():
    model = build("Llama")
    with session(model, RunShape()) as observed:
        ids = known(observed, torch.zeros((1, 4), dtype=torch.int64))
        model(input_ids=ids, use_cache=True)
        assert observed.shadow.decisions == []


def test_a_factory_like_an_unknown_tensor_has_its_number_as_value():
    shadow = Shadow()
    unknown = torch.empty((2, 3), device="meta")

    outs = [
        shadow.run(func, (unknown, *args), {"dtype": torch.int32, "device": torch.device("meta")})
        for func, args in (
            (torch.ops.aten.zeros_like.default, ()),
            (torch.ops.aten.ones_like.default, ()),
            (torch.ops.aten.new_full.default, ([2], 7)),
        )
    ]

    assert [shadow.value(out).tolist() for out in outs] == [[[0, 0, 0]] * 2, [[1, 1, 1]] * 2, [7, 7]]
    assert shadow.value(unknown) is None
