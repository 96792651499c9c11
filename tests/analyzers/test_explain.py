from __future__ import annotations

import json

import pytest
from support.tiny import LLAMA

import introspect
from introspect.analyzers import explain
from introspect.explain_record import Dimension, ExplainRecord


@pytest.mark.parametrize(
    ("terms", "text"),
    [
        (((1, ("intermediate_size",)),), "intermediate_size"),
        (((1, ("kv_lora_rank",)), (1, ("qk_rope_head_dim",))), "kv_lora_rank + qk_rope_head_dim"),
        (((2, ("a", "b")), (-1, ("c",)), (3, ())), "2 * a * b - c + 3"),
        (((-1, ("a",)),), "-a"),
        (((1, ("a // b",)),), "a // b"),
        (((1, ("a // b", "c")), (2, ("a // b",))), "(a // b) * c + 2 * (a // b)"),
        ((), "0"),
        (None, None),
    ],
)
def test_terms_are_written_in_alphabetical_order(terms, text):
    assert explain.expression(terms) == text


@pytest.mark.parametrize(
    ("width", "hidden", "guess"),
    [
        (11008, 4096, "1 x 2/3 x 4d rounded up to 256"),  # Llama 7B: 10922 -> 11008
        (14336, 4096, "1.3 x 2/3 x 4d rounded up to 1024"),  # Llama-3-8B: 14198 -> 14336
        (28672, 8192, "1.3 x 2/3 x 4d rounded up to 4096"),  # Llama-3-70B: 28398 -> 28672
        (53248, 16384, None),  # Llama-3.1-405B
        (3072, 768, "4d"),
    ],
)
def test_the_guess_at_a_width_is_the_largest_multiple_that_gives_it(width, hidden, guess):
    assert explain._rule_guess(width, hidden) == guess


def test_one_row_for_each_dimension_and_the_widths_of_the_ffn(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **LLAMA}))
    result = introspect.analyze("explain", str(path), module="*mlp*")

    found = {(row["module"], row["dimension"]): row["expression"] for row in result.tables["dimensions"].rows}
    assert found["model.layers.*.mlp.down_proj", "k"] == "intermediate_size"
    assert found["model.layers.*.mlp.down_proj", "n"] == "hidden_size"
    assert len(found) == 6
    widths = result.tables["ffn_widths"].rows
    assert {(row["width"], row["ratio"], row["power_of_two"]) for row in widths} == {(160, 2.5, 32)}


def dimension(module, name, value, *fields, terms=None):
    return Dimension(
        module=module, dimension=name, value=value, fields=fields, terms=terms or ((1, fields),), confirmed=True
    )


def test_a_width_is_measured_by_the_input_of_its_own_ffn(monkeypatch):
    """Of a tower that did not run, attention is told by the fields it shares with attention that did."""
    heads = ("v.head_dim", "v.heads")
    dimensions = (
        dimension("v.q", "k", 32, "v.hidden"),
        dimension("v.q", "n", 48, *heads),
        dimension("v.o", "k", 48, *heads),
        dimension("v.o", "n", 32, "v.hidden"),
        dimension("v.up", "k", 32, "v.hidden"),
        dimension("v.up", "n", 128, "v.hidden", terms=((4, ("v.hidden",)),)),
        dimension("v.down", "k", 128, "v.hidden", terms=((4, ("v.hidden",)),)),
        dimension("v.down", "n", 32, "v.hidden"),
        dimension("t.attention", "query_heads", 4, "t.heads"),
        dimension("t.attention", "qk_head_dim", 16, "t.head_dim"),
    )
    monkeypatch.setattr(explain, "_feeding", lambda trace: {})

    (row,) = explain._width_rows(dimensions, None)
    assert (row["module"], row["width"], row["hidden"], row["rule_guess"]) == ("v.up", 128, 32, "4d")


def test_a_width_of_four_times_the_hidden_one_is_found(tmp_path):
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512}
    path.write_text(json.dumps({"model_type": "bloom", "architectures": ["BloomForCausalLM"], **sizes}))
    result = introspect.analyze("explain", str(path))

    (row,) = result.tables["ffn_widths"].rows
    assert (row["module"], row["width"], row["hidden"]) == ("transformer.h.*.mlp.dense_h_to_4h", 256, 64)


def test_fields_that_move_only_together_are_listed():
    record = ExplainRecord(
        dimensions=(), structural=("layers",), still=("eos",), stuck=("rope",), joint={"a": ("b", "c")}, builds=1
    )

    effects = {row["field"]: row["effect"].partition(":")[0] for row in explain._field_rows(record)}
    assert effects == {"layers": "structural", "eos": "still", "rope": "stuck", "a": "joint"}
