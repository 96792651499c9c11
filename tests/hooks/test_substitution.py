from __future__ import annotations

from support.tiny import build
from torch import nn

from introspect.hooks.substitution import gather_substitutions


def test_a_field_is_worth_the_parameters_it_alone_adds():
    worth = gather_substitutions(
        build("Llama"), {"intermediate_size": 200, "vocab_size": 256, "rope_theta": 1.0, "hidden_act": "no such"}
    )

    assert worth["intermediate_size"] == 2 * 3 * 64 * 40
    assert worth["vocab_size"] == -2 * 256 * 64
    assert worth["hidden_act"] is None  # cannot be built so


def test_a_module_without_a_config_has_no_fields():
    assert gather_substitutions(nn.Linear(2, 2), {"a": 1}) == {"a": None}
