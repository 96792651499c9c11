"""The one-page cost: against the commands it sums up, and published figures."""

from __future__ import annotations

import pytest

import introspect

MODELS = ("meta-llama/Meta-Llama-3-8B", "mistralai/Mixtral-8x7B-v0.1")


@pytest.fixture(scope="module")
def llama():
    return introspect.analyze("cost", MODELS[0], gpu=("h100-sxm", "t4"), offline=True)


def terms(result, quantity):
    return next(row for row in result.tables["terms"].rows if row["quantity"] == quantity)


def test_totals_are_those_of_the_other_commands(llama):
    params = introspect.analyze("params", MODELS[0], offline=True).totals
    kv = introspect.analyze("kv", MODELS[0], context=131072, offline=True).totals
    assert llama.totals["params"] == params["total"]
    assert llama.totals["active_params"] == params["active"]
    assert llama.totals["weight_bytes"] == params["weight_bytes"]
    assert llama.totals["kv_bytes_per_token"] == kv["bytes_per_token"]
    assert llama.totals["kv_bytes_at_128k"] == kv["bytes_at_context"]


def test_bounds_are_those_of_roofline(llama):
    row = llama.tables["gpus"].rows[0]
    decode = introspect.analyze("roofline", MODELS[0], phase="decode", offline=True).tables["gpus"].rows[0]
    prefill = introspect.analyze("roofline", MODELS[0], seq=8192, offline=True).tables["gpus"].rows[0]
    assert row["gpus_needed"] == 1
    assert row["decode_seconds"] == pytest.approx(decode["seconds"])
    assert row["prefill_8k_seconds"] == pytest.approx(prefill["seconds"])
    assert row["max_batch"] == decode["max_batch"]
    batch = introspect.analyze("roofline", MODELS[0], phase="decode", batch=row["max_batch"], offline=True)
    assert row["best_tokens_per_second"] == pytest.approx(batch.tables["gpus"].rows[0]["tokens_per_second"])


def test_a_gpu_without_the_rate_still_says_how_many(llama):
    row = llama.tables["gpus"].rows[1]
    assert row["gpu"] == "t4"
    assert row["gpus_needed"] == 2  # 16.06 GB on 16 GB
    assert row["decode_seconds"] is None


def test_terms_of_llama_3_8b(llama):
    flops = terms(llama, "decode_flops")
    assert flops["per_cached_token"] == 4 * 4096 * 32
    assert flops["per_sequence"] == 15_009_316_864 + 4 * 4096 * 32  # the new token attends itself too
    assert flops["constant"] == 0
    assert terms(llama, "memory_bytes")["constant"] == 16_060_522_496
    assert terms(llama, "memory_bytes")["per_cached_token"] == 131_072
    assert terms(llama, "decode_bytes")["per_cached_token"] == 131_072
    prompt = terms(llama, "prefill_flops")
    assert prompt["per_prompt_token_squared"] == 4 * 4096 * 32 / 2  # half of the square is visible
    assert prompt["per_sequence"] == 2 * 4096 * 128256  # the head on the last position


def test_one_gpu_sends_nothing_and_ranks_what_shard_says(llama):
    assert set(list(terms(llama, "wire_bytes").values())[2:]) == {0}
    ranks = introspect.analyze("cost", MODELS[0], tp=4, offline=True)
    shard = introspect.analyze(
        "shard", MODELS[0], phase="decode", context=2048, tp=4, engine="megatron", offline=True
    ).totals
    assert terms(ranks, "wire_bytes")["per_sequence"] == shard["wire_bytes_per_step"]


def test_terms_predict_a_step_that_was_not_measured(llama):
    row = terms(llama, "decode_flops")
    traced = introspect.analyze("trace", MODELS[0], phase="decode", batch=5, context=9000, offline=True)
    predicted = row["constant"] + 5 * (row["per_sequence"] + 9000 * row["per_cached_token"])
    assert predicted == traced.totals["engine_flops"]


def test_several_models_give_a_result_each():
    first, second = introspect.analyze("cost", list(MODELS), offline=True)
    assert (first.model["id"], second.model["id"]) == MODELS
    assert second.totals["weight_flops_per_token"] == 25_497_174_016
    # 93.4 GB of weights on 80 GB
    assert second.tables["gpus"].rows[0]["gpus_needed"] == 2
