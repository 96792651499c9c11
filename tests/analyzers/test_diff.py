from __future__ import annotations

import json

import pytest
from support.tiny import LLAMA

import introspect
from introspect.render import render

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
    assert fields["num_key_value_heads"]["kv_bytes_per_token_delta"] == 2 * 2 * 2 * 16 * 2
    assert fields["intermediate_size"]["kv_bytes_per_token_delta"] == 0
    assert {name: row["weight_bytes_delta"] / row["params_delta"] for name, row in fields.items()} == dict.fromkeys(
        fields, 2
    )
    assert {name: row["flops_per_token_delta"] / row["params_delta"] for name, row in fields.items()} == dict.fromkeys(
        fields, 2
    )
    gates = [row for row in result.tables["gemms"].rows if row["module"].endswith("gate_proj")]
    assert {(row["n"], row["count_a"], row["count_b"]) for row in gates} == {(160, 2, 0), (200, 0, 2)}


def test_fields_of_another_class_are_not_taken_over(write):
    other = write("b", model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    result = introspect.analyze("diff", [write("a"), other], seq=8)

    assert result.tables["fields"].rows == ()
    assert "no table `fields`: LlamaForCausalLM and Qwen2ForCausalLM are two classes" in result.notes[1]
    assert by(result, "components", "component")["bias"]["delta"] == 2 * (64 + 32 + 32)


@pytest.mark.parametrize("name", ["torch_dtype", "dtype"])
def test_a_dtype_costs_the_bytes_of_weights_and_cache_however_it_is_called(write, name):
    a, b = write("a", vocab_size=128), write("b", vocab_size=128, **{"torch_dtype": None, name: "float32"})
    result = introspect.analyze("diff", [a, b], seq=8)

    (row,) = (row for row in result.tables["fields"].rows if row["field"] == "torch_dtype")
    parameters = by(result, "components", "component")["total"]["a"]
    assert (row["params_delta"], row["flops_per_token_delta"]) == (0, 0)
    assert row["weight_bytes_delta"] == 2 * parameters
    assert row["kv_bytes_per_token_delta"] == 2 * 2 * 2 * 16 * 2  # layers, key and value, heads, width, bytes more
    assert by(result, "components", "component")["weight_bytes"]["delta"] == row["weight_bytes_delta"]


def test_a_field_that_the_class_refuses_alone_has_no_costs(tmp_path):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, width, heads in zip(paths, (64, 96), (4, 3), strict=True):
        fields = {"n_embd": width, "n_head": heads, "n_layer": 2, "vocab_size": 512}
        path.write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **fields}))
    result = introspect.analyze("diff", [str(path) for path in paths], seq=8)

    fields = by(result, "fields", "field")
    refused = fields["n_head"]  # 64 is no multiple of 3
    assert [refused[name] for name in list(refused)[3:]] == [None] * 4
    assert fields["n_embd"]["kv_bytes_per_token_delta"] == 2 * 2 * (96 - 64) * 2  # layers, key and value, width, bytes


def test_the_title_names_both_models(write):
    a, b = write("a"), write("b", vocab_size=256)
    result = introspect.analyze("diff", [a, b], seq=8)

    assert (result.model["id"], result.model["other"]) == (a, b)
    assert f"diff {a} (LlamaForCausalLM) against {b} (LlamaForCausalLM)" in render([result], "table")
