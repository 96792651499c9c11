from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from introspect.errors import OptionError
from introspect.hooks.inputs import FORMS, POSITIONAL, named_inputs, run_on, step_shape

IDS = torch.zeros((2, 32), dtype=torch.int64)
REALS = torch.zeros(2, 7, 8)


class Takes(nn.Module):
    def forward(self, idx: Any, targets: Any = None, **rest: Any) -> Any:
        return idx, targets, rest


class TakesAny(nn.Module):
    def forward(self, *parts: Any, scale: int = 1) -> Any:
        return parts, scale


class TestForms:
    def test_a_tensor_a_tuple_a_list_and_a_dict_name_the_same_arguments(self):
        for given in (IDS, (IDS,), [IDS], {"idx": IDS}):
            assert named_inputs(Takes(), given) == {"idx": IDS}
        assert named_inputs(Takes(), (IDS, REALS)) == {"idx": IDS, "targets": REALS}

    def test_keywords_come_in_forwards_order_and_free_ones_stay(self):
        named = named_inputs(Takes(), {"more": 1, "targets": REALS, "idx": IDS})

        assert list(named) == ["idx", "targets", "more"]
        assert run_on(Takes(), named) == (IDS, REALS, {"more": 1})

    def test_arguments_without_names_keep_their_places(self):
        named = named_inputs(TakesAny(), (IDS, REALS))

        assert named == {POSITIONAL: (IDS, REALS)}
        assert run_on(TakesAny(), named) == ((IDS, REALS), 1)

    @pytest.mark.parametrize(("given", "found"), [(3, "int"), ("ids", "str"), ({1: IDS}, "dict")])
    def test_another_form_is_refused(self, given, found):
        with pytest.raises(OptionError) as caught:
            named_inputs(Takes(), given)
        assert str(caught.value) == f"inputs: got {found!r}, expected {FORMS}"

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (
                {"x": REALS},
                "inputs: got 'x', expected what Linear.forward(input) takes: missing a required argument: 'input'",
            ),
            (
                (REALS, REALS),
                "inputs: got '2 positional', expected what Linear.forward(input) takes: too many positional arguments",
            ),
        ],
    )
    def test_what_forward_does_not_take_is_named(self, given, message):
        with pytest.raises(OptionError) as caught:
            named_inputs(nn.Linear(8, 8), given)
        assert str(caught.value) == message


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"idx": IDS}, (2, 32)),
        ({"src": IDS, "tgt": IDS[:, :5]}, (2, 32)),  # the first of two
        ({"attention_mask": IDS[:1], "input_ids": IDS}, (2, 32)),
        ({"features": torch.zeros(3, 80, 3000), "decoder_input_ids": IDS}, (2, 32)),  # speech: the decoder's tokens
        ({"x": torch.zeros(5, 8), "edge_index": IDS}, (5, 1)),  # a graph: rows are its nodes
        ({"x": REALS}, (2, 7)),
        ({"x": torch.zeros(4, 8)}, (4, 1)),
        ({"x": torch.zeros(2, 3, 32, 32)}, (2, 1)),
        ({"x": torch.zeros(8)}, (1, 1)),
        ({"ids": IDS[0]}, (32, 1)),
        ({POSITIONAL: (IDS, REALS)}, (2, 32)),
        ({"scale": 3}, (1, 1)),
    ],
)
def test_the_step_that_inputs_are(inputs, expected):
    assert step_shape(nn.Linear(8, 8), inputs) == expected


def test_the_second_dimension_before_a_convolution_are_channels():
    assert step_shape(nn.Sequential(nn.Conv1d(7, 4, 3), nn.Linear(6, 2)), {"input": REALS}) == (2, 1)
