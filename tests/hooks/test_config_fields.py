from __future__ import annotations

import pytest
from transformers import LlamaConfig

from introspect.hooks.config_fields import (
    LENGTH,
    counted_by,
    cuts,
    differing,
    dotted,
    elements,
    fields_of,
    integers,
    read,
    scaled,
    shortened,
)


def test_integers_are_found_wherever_they_stand_and_lists_count_once():
    fields = {"width": 64, "ratio": 0.5, "tied": True, "inner": {"heads": 8, "kernels": [16, 32]}, "kinds": ["a", "b"]}

    assert integers(fields, 1) == {("width",): 64, ("inner", "heads"): 8, ("inner", "kernels"): 16}
    assert integers(fields, 16) == {("width",): 64, ("inner", "kernels"): 16}


def test_scaling_changes_a_copy_and_lists_shrink_in_proportion():
    fields = {"width": 64, "inner": {"kernels": [16, 32]}}

    changed = scaled(fields, {("width",): 16, ("inner", "kernels"): 4})

    assert changed == {"width": 16, "inner": {"kernels": [4, 8]}}
    assert fields == {"width": 64, "inner": {"kernels": [16, 32]}}


def test_a_list_is_given_a_length_and_an_absent_field_is_added():
    fields = {"inner": {"layers": 2, "kinds": ["a", "b"], "pattern": "MEME"}}

    lengths = {("inner", "kinds", LENGTH): 3, ("inner", "pattern", LENGTH): 2, ("inner", "width"): 8}
    assert scaled(fields, lengths) == {"inner": {"layers": 2, "kinds": ["a", "b", "a"], "pattern": "ME", "width": 8}}
    with pytest.raises(KeyError):
        scaled(fields, {("other", "width"): 8})


def test_the_lists_that_an_integer_counts_stand_beside_it():
    fields = {
        "layers": 4,
        "kinds": [*"abab"],
        "pattern": "MEME",
        "act": "silu",
        "inner": {"kinds": [*"abab"]},
        "one": 1,
    }

    assert counted_by(fields, ("layers",)) == (("kinds", LENGTH), ("pattern", LENGTH))
    assert counted_by(fields, ("one",)) == ()


def test_a_path_is_one_name_and_a_field_one_or_more_integers():
    fields = {"inner": {"heads": 8, "kernels": [16, 32]}}

    assert dotted(("inner", "heads")) == "inner.heads"
    assert elements(fields, ("inner", "heads")) == (8,)
    assert elements(fields, ("inner", "kernels")) == (16, 32)


def test_a_file_is_shortened_where_it_has_what_was_cut_and_under_its_own_names():
    whole = {"text": {"num_layers": 4, "kinds": [*"abab"], "heads": 4, "derived": [1, 2, 3, 4]}}
    short = {"text": {"num_layers": 2, "kinds": [*"ab"], "heads": 4, "derived": [1, 2]}}
    raw = {"text": {"n_layer": 4, "kinds": [*"abab"], "heads": 4}, "only": {"n_layer": 4}}

    assert shortened(raw, whole, short) == {
        "text": {"n_layer": 2, "kinds": [*"ab"], "heads": 4},
        "only": {"n_layer": 4},
    }
    assert raw["text"]["n_layer"] == 4


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
