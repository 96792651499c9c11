from __future__ import annotations

import json

import pytest
from support.tiny import LLAMA

import introspect

BASE = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", **LLAMA}


@pytest.fixture
def write(tmp_path):
    def one(name, **changes):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({**BASE, **changes}))
        return str(path)

    return one


def by(result, table, name):
    return {row[name]: row for row in result.tables[table].rows}


def test_a_model_equals_itself(write):
    result = introspect.analyze("diff", [write("a"), write("a")], seq=8)

    assert {row["delta"] for row in result.tables["components"].rows} == {0}
    assert result.tables["config"].rows == result.tables["gemms"].rows == ()


def test_each_difference_is_named_with_what_it_costs(write):
    result = introspect.analyze("diff", [write("a"), write("b", intermediate_size=200, num_key_value_heads=4)], seq=8)

    parts = by(result, "components", "component")
    assert parts["ffn"]["delta"] == 2 * 3 * 64 * 40
    assert parts["attention"]["delta"] == 2 * 2 * 64 * 32
    assert parts["total"]["delta"] == parts["ffn"]["delta"] + parts["attention"]["delta"]
    fields = by(result, "fields", "field")
    assert fields["intermediate_size"]["params_delta"] == 2 * 3 * 64 * 40
    assert fields["num_key_value_heads"]["params_delta"] == 2 * 2 * 64 * 32
    assert by(result, "step", "quantity")["kv_bytes_per_token"]["delta"] == 2 * 2 * 2 * 16 * 2
    gates = [row for row in result.tables["gemms"].rows if row["module"].endswith("gate_proj")]
    assert {(row["n"], row["count_a"], row["count_b"]) for row in gates} == {(160, 2, 0), (200, 0, 2)}


def test_fields_of_another_class_are_not_taken_over(write):
    other = write("b", model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    result = introspect.analyze("diff", [write("a"), other], seq=8)

    assert result.tables["fields"].rows == ()
    assert by(result, "components", "component")["bias"]["delta"] == 2 * (64 + 32 + 32)
