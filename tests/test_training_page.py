"""The pages on training and formats against what the commands answer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import introspect
from introspect.analyzers._optimizers import RECIPES
from introspect.formats import load_formats

DOCS = Path(__file__).parents[1] / "docs"
TRAINING, FORMATS = ((DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("training", "quantisation"))
LLAMA = "meta-llama/Meta-Llama-3-8B"


def cells(page, first):
    """The cells of the row whose first cell starts so."""
    (found,) = (line for line in page.splitlines() if line.startswith(f"| {first}"))
    return [cell.strip() for cell in found.strip("|").split("|")]


@pytest.fixture(scope="module")
def train():
    return introspect.analyze("train", LLAMA, seq=2048)


def test_flops_of_the_training_page(train):
    rules = {row["part"]: row["flops_per_token"] for row in train.tables["flops"].rows}

    for first, count in (
        ("6 x 8.03 B", rules["6N, N = all parameters"]),
        ("6 x parameters in products", rules["6N, N = parameters in products"]),
        ("record |", train.totals["flops_per_token"]),
        ("record with checkpointing", train.totals["flops_per_token_recompute"]),
    ):
        assert float(cells(TRAINING, first)[1]) == pytest.approx(count / 1e9, abs=0.005)
    assert f"{rules['8N, N = all parameters'] / 1e9:.2f}" in TRAINING


def test_every_recipe_and_method_has_a_row(train):
    assert all(f"| `{name}` |" in TRAINING for name in RECIPES)
    assert all(f"| `{row['method']}` |" in TRAINING for row in train.tables["activations"].rows)


def test_every_format_is_on_the_page():
    table = "\n".join(line for line in FORMATS.splitlines() if line.startswith("|"))

    for name in load_formats():
        last = name.rpartition("-")[2]
        assert name in table or f"-{last}" in table or name == "bf16"


def test_sizes_on_the_page():
    found = introspect.analyze("quant", "deepseek-ai/DeepSeek-V3", only="native", context=64, seq=64)
    gain = introspect.analyze("quant", LLAMA, only="int4-g128").tables["gpus"].rows[0]["decode_gain"]

    assert f"{found.tables['formats'].rows[0]['weight_bytes'] / 1e9:.1f} GB" in FORMATS
    assert f"{gain:.1f} times at 2,048 cached tokens" in re.sub(r"\s+", " ", FORMATS)
