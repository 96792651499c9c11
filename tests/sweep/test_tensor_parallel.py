"""Tensor parallel degrees of real models: the shards of every rank sum to the whole model, or the failure is named."""

from __future__ import annotations

import re
from math import prod

import pytest

import introspect
from introspect.errors import ShardingError

MODELS = (
    "meta-llama/Meta-Llama-3-8B",
    "meta-llama/Meta-Llama-3-70B",
    "Qwen/Qwen2.5-7B",
    "mistralai/Mixtral-8x7B-v0.1",
    "deepseek-ai/DeepSeek-V3",
    "openai/gpt-oss-20b",
    "google/gemma-2-2b",
)
DEGREES = (2, 4, 8, 16)
CONTEXT = 4096
ENGINES = ("transformers", "megatron")

# What does not divide, by (model, engine): the first degree that fails, what it says, and what it says to take.
# Transformers cuts KV heads and never repeats them; Megatron's rules repeat KV heads, and query heads must divide.
FAILS: dict[tuple[str, str], tuple[int, str, str]] = {
    ("meta-llama/Meta-Llama-3-8B", "transformers"): (16, "8 KV heads", "8"),
    ("meta-llama/Meta-Llama-3-70B", "transformers"): (16, "8 KV heads", "8"),
    ("Qwen/Qwen2.5-7B", "transformers"): (8, "4 KV heads", "4"),
    ("Qwen/Qwen2.5-7B", "megatron"): (8, "28 query heads", "4"),
    ("mistralai/Mixtral-8x7B-v0.1", "transformers"): (16, "8 KV heads", "8"),
    ("google/gemma-2-2b", "transformers"): (8, "4 KV heads", "4"),
    ("google/gemma-2-2b", "megatron"): (16, "8 query heads", "8"),
}


@pytest.fixture(scope="module")
def whole():
    """Parameters, and cache bytes a token adds at CONTEXT, of the unsharded model, as other commands find them."""
    return {
        name: (
            introspect.analyze("params", name).totals["total"],
            introspect.analyze("kv", name, context=CONTEXT).totals["bytes_per_token"],
        )
        for name in MODELS
    }


@pytest.mark.sweep
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tp", DEGREES)
@pytest.mark.parametrize("model", MODELS)
def test_shards_sum_to_the_whole_or_the_failure_is_named(model, tp, engine, whole):
    first, problem, degree = FAILS.get((model, engine), (max(DEGREES) + 1, "", ""))
    options = {"tp": tp, "engine": engine, "phase": "decode", "context": CONTEXT}
    if tp >= first:
        with pytest.raises(ShardingError, match=rf"{problem} of \S+ do not divide by {tp}") as error:
            introspect.analyze("shard", model, **options)
        assert error.value.expected == f"--tp {degree}"
        return
    result = introspect.analyze("shard", model, **options)

    elements = 0
    for row in result.tables["parameters"].rows:
        cut = row["shape"] != row["whole_shape"]
        assert prod(row["shape"]) * (tp if cut else 1) == prod(row["whole_shape"]) * (row["copies"] if cut else 1), row
        elements += prod(row["whole_shape"]) * row["count"]
    parameters, kv_bytes_per_token = whole[model]
    assert elements == parameters
    totals = result.totals
    assert totals["kv_bytes_per_token_per_rank"] * tp == kv_bytes_per_token * totals["kv_replication"]


@pytest.mark.sweep
def test_every_expected_failure_is_of_a_case_that_ran():
    assert {model for model, _ in FAILS} <= set(MODELS)
    assert {degree for degree, _, _ in FAILS.values()} <= set(DEGREES)
    assert all(re.fullmatch(r"\d+ (KV|query) heads", problem) for _, problem, _ in FAILS.values())
