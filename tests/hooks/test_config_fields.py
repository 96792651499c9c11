from __future__ import annotations

import pytest
from transformers import LlamaConfig

from introspect.hooks.config_fields import cuts, differing, fields_of, integers, read, scaled


def test_integers_are_found_wherever_they_stand_and_lists_count_once():
    fields = {"width": 64, "ratio": 0.5, "tied": True, "inner": {"heads": 8, "kernels": [16, 32]}, "kinds": ["a", "b"]}

    assert integers(fields, 1) == {("width",): 64, ("inner", "heads"): 8, ("inner", "kernels"): 16}
    assert integers(fields, 16) == {("width",): 64, ("inner", "kernels"): 16}


def test_scaling_changes_a_copy_and_lists_shrink_in_proportion():
    fields = {"width": 64, "inner": {"kernels": [16, 32]}}

    changed = scaled(fields, {("width",): 16, ("inner", "kernels"): 4})

    assert changed == {"width": 16, "inner": {"kernels": [4, 8]}}
    assert fields == {"width": 64, "inner": {"kernels": [16, 32]}}


@pytest.mark.parametrize(
    ("value", "cut"),
    [
        (["full", "sliding", "full", "sliding"], ["full", "sliding"]),
        ([1, 3], [1]),  # indices of layers
        ("MEME", "ME"),
        ({"0": {"width": 1}, "3": {"width": 2}}, {"0": {"width": 1}}),
        ([7, 9], [7, 9]),  # no layer has such an index
        ("silu", "silu"),  # four letters, but none comes twice
    ],
)
def test_what_speaks_of_layers_is_cut_with_their_count(value, cut):
    fields = {"layers": 4, "other": value}

    assert {"layers": 2, "other": cut} in list(cuts(fields, 4, 2))


def test_each_integer_of_that_value_is_tried_alone_then_all_together():
    fields = {"layers": 4, "heads": 4, "width": 8}

    assert list(cuts(fields, 4, 2)) == [
        {"layers": 2, "heads": 4, "width": 8},
        {"layers": 4, "heads": 2, "width": 8},
        {"layers": 2, "heads": 2, "width": 8},
    ]


def test_a_config_survives_the_way_through_fields_and_changed_ones_are_named():
    config = LlamaConfig(hidden_size=64, num_attention_heads=4)
    other = read(LlamaConfig, scaled(fields_of(config), {("hidden_size",): 32}))

    assert other.num_attention_heads == 4
    assert list(differing(config, other)) == [("hidden_size", "64", "32")]
