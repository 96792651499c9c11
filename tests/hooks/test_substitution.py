from __future__ import annotations

import torch
from support.tiny import build
from torch import nn

from introspect.hooks import substitution
from introspect.hooks.substitution import gather_substitutions
from introspect.records import RunShape

DECODE = RunShape(phase="decode", seq=1, context=8)


def weight_bytes(trace):
    return sum(parameter.bytes for parameter in trace.parameters if not parameter.buffer)


def test_a_field_is_worth_the_parameters_it_alone_adds():
    others = {"intermediate_size": 200, "vocab_size": 256, "rope_theta": 1.0, "hidden_act": "no such"}
    found = gather_substitutions(build("Llama"), others, DECODE)

    own = found[""].parameters
    assert found["intermediate_size"].parameters - own == 2 * 3 * 64 * 40
    assert found["vocab_size"].parameters - own == -2 * 256 * 64
    assert found["rope_theta"].parameters == own
    assert found["hidden_act"] is None  # cannot be built so


def test_each_is_run_and_its_cache_is_in_the_record():
    found = gather_substitutions(build("Llama"), {"num_key_value_heads": 4}, DECODE)

    heads = {name: one.trace.cache[0].shape_before[1] for name, one in found.items()}
    assert heads == {"": 2, "num_key_value_heads": 4}


def test_a_dtype_is_a_field_under_either_name_unless_the_run_names_one():
    module = build("Llama", dtype=torch.bfloat16)
    for name in ("dtype", "torch_dtype"):
        found = gather_substitutions(module, {name: "float32"}, DECODE)
        assert weight_bytes(found[name].trace) == 2 * weight_bytes(found[""].trace)

    asked = gather_substitutions(module, {"dtype": "float32"}, DECODE.with_(dtype="bf16"))
    assert weight_bytes(asked["dtype"].trace) == weight_bytes(asked[""].trace)


def test_what_builds_and_does_not_run_has_no_record(monkeypatch):
    def refuse(*_):
        raise RuntimeError("sizes that do not meet")

    monkeypatch.setattr(substitution, "observe", refuse)
    found = gather_substitutions(build("Llama"), {"num_key_value_heads": 4}, DECODE)

    assert found["num_key_value_heads"].parameters == found[""].parameters + 2 * 2 * 64 * 32
    assert found["num_key_value_heads"].trace is None


def test_a_module_without_a_config_has_no_fields():
    assert gather_substitutions(nn.Linear(2, 2), {"a": 1}, DECODE) == {"": None, "a": None}
