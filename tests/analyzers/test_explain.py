from __future__ import annotations

import json

import pytest
from support.tiny import LLAMA

import introspect
from introspect.analyzers import explain


@pytest.mark.parametrize(
    ("terms", "text"),
    [
        (((1, ("intermediate_size",)),), "intermediate_size"),
        (((1, ("kv_lora_rank",)), (1, ("qk_rope_head_dim",))), "kv_lora_rank + qk_rope_head_dim"),
        (((2, ("a", "b")), (-1, ("c",)), (3, ())), "2 * a * b - c + 3"),
        (((-1, ("a",)),), "-a"),
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
