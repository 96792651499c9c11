"""Layers of module paths, and ranges of them."""

from __future__ import annotations

import pytest

from introspect.analyzers._folding import LayerPaths, layer_ranges

MODULES = (
    "",
    "model",
    "model.layers",
    "model.layers.0",
    "model.layers.0.mlp",
    "model.layers.0.mlp.0",
    "model.layers.0.experts",
    "model.layers.0.experts.3",
    "model.layers.0.experts.3.up",
    "heads",
    "heads.1",
)


@pytest.mark.parametrize(
    ("path", "pattern", "layer"),
    [
        ("model.layers.0.mlp.up.weight", "model.layers.*.mlp.up.weight", (0,)),
        ("model.layers.0.mlp.0.weight", "model.layers.*.mlp.0.weight", (0,)),  # a leaf of a Sequential is no layer
        ("model.layers.0.experts.3.up", "model.layers.*.experts.*.up", (0, 3)),
        ("heads.1.weight", "heads.1.weight", ()),
        ("model.norm.weight", "model.norm.weight", ()),
    ],
)
def test_split(path, pattern, layer):
    assert LayerPaths(MODULES).split(path) == (pattern, layer)


def test_the_layer_of_a_path_is_the_outermost():
    paths = LayerPaths(MODULES)
    assert paths.layer_path("model.layers.0.experts.3.up.weight") == "model.layers.0"
    assert paths.layer_path("heads.1.weight") is None


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((), ""),
        ((5,), "5"),
        (range(32), "0-31"),
        ((0, 1, 2, 5, 7, 8), "0-2,5,7-8"),
        ((0, 2, 4, 6), "0-6:2"),
        ((1, 7), "1,7"),
        ((3, 3, 4), "3-4"),
    ],
)
def test_ranges(numbers, text):
    assert layer_ranges((number,) for number in numbers) == text
