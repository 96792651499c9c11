"""Bounds on a step's time: by hand, published figures, and laws between them."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tiny import build, record
from support.traces import HIDDEN, VOCABULARY, latent_model, llama, moe_ffn

import introspect
from introspect.analyzers._roofline import FAR, Machine, Work, smallest, step_work, total_seconds
from introspect.analyzers._step import Step
from introspect.gpus import find_gpus

LLAMA = "meta-llama/Meta-Llama-3-8B"


def gpu_row(model, **options):
    (row,) = introspect.analyze("roofline", model, **options).tables["gpus"].rows
    return row


@pytest.fixture
def slow(tmp_path):
    """A GPU of 1 GB, 10 GB/s and 1 TFLOP/s in bf16: ridge 100."""
    row = {
        "memory_bytes": 1e9,
        "bandwidth_bytes_per_second": 1e10,
        "dense_peak_per_second": {"bf16": 1e12},
        "source_url": "https://vendor.example/sheet",
        "retrieved": "2026-01-31",
    }
    path = tmp_path / "gpus.json"
    path.write_text(json.dumps({"gpus": {"slow": row}}))
    return {"gpu": "slow", "gpu_file": str(path)}


def decode(**run):
    return llama(**{"phase": "decode", "seq": 1, "context": 10, **run})


def test_parameters_outside_products_are_read_too():
    step = Step(decode())
    (beside,) = (work for work in step_work(step) if work.kind == "parameters")
    assert beside.weight_bytes == 2 * 5 * HIDDEN  # five norms in bf16
    assert beside.activation_bytes == 2 * HIDDEN  # one row of the embedding
    assert sum(work.weight_bytes for work in step_work(step)) + 2 * HIDDEN == step.weight_reads.expected


@pytest.mark.parametrize("run", [{"phase": "prefill", "seq": 64}, {"phase": "decode", "context": 64}])
def test_what_a_scan_passes_on_stays_on_the_chip(run):
    trace = record(build("Mamba", dtype=torch.bfloat16), **run)
    scans = [work for work in step_work(Step(trace)) if work.flops and not work.weights]
    assert scans
    assert all(work.bytes == 0 for work in scans)
    row = gpu_row(trace)
    assert row["seconds_floor"] <= row["seconds"]


def test_one_product_by_hand(slow):
    result = introspect.analyze("roofline", decode(), **slow)
    (head,) = (row for row in result.tables["ops"].rows if row["module"] == "head")
    moved = 2 * (HIDDEN + HIDDEN * VOCABULARY + VOCABULARY)  # input, weight and result in bf16
    assert (head["flops"], head["bytes"]) == (2 * HIDDEN * VOCABULARY, moved)
    assert head["seconds"] == pytest.approx(moved / 1e10)
    assert (head["bound"], head["intensity"]) == ("memory", 2 * HIDDEN * VOCABULARY / moved)


def test_attention_reads_keys_and_values_once(slow):
    result = introspect.analyze("roofline", decode(), **slow)
    (attention,) = (row for row in result.tables["ops"].rows if row["kind"] == "attention")
    # 2 layers; 11 keys and values of 2 heads x 8; queries and results of 4 heads x 8
    assert attention["bytes"] == 2 * 2 * (2 * 11 * 2 * 8 + 2 * 4 * 8)
    assert attention["flops"] == 2 * 2 * 2 * 11 * 4 * 8


def test_the_sum_of_ops_is_the_step(slow):
    result = introspect.analyze("roofline", decode(batch=3), **slow)
    (row,), ops = result.tables["gpus"].rows, result.tables["ops"].rows
    assert row["seconds"] == pytest.approx(sum(op["seconds"] for op in ops))
    assert sum(op["share"] for op in ops) == pytest.approx(1)
    assert result.totals["flops"] == sum(op["flops"] for op in ops)


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from(["prefill", "decode"]))
def test_bounds_keep_their_order(batch, context, phase):
    trace = llama(
        phase=phase, batch=batch, seq=1 if phase == "decode" else context, context=context if phase == "decode" else 0
    )
    row = gpu_row(trace)
    assert 0 < row["seconds_floor"] <= row["seconds"] <= row["seconds_unfused"]
    assert row["seconds"] == row["seconds_ceiling"]  # no routed experts
    assert row["seconds_floor"] <= row["seconds_whole_weights"]


@given(st.floats(0.05, 1), st.floats(0.05, 1))
def test_reached_shares_stretch_time(mfu, mbu):
    full, part = gpu_row(decode()), gpu_row(decode(), mfu=mfu, mbu=mbu)
    assert part["seconds"] >= full["seconds"]
    assert part["ridge_flop_per_byte"] == pytest.approx(full["ridge_flop_per_byte"] * mfu / mbu)
    assert gpu_row(decode(), mfu=mfu, mbu=mfu)["seconds"] == pytest.approx(full["seconds"] / mfu)


def test_a_larger_batch_scales_everything_but_the_weights():
    one, many = (step_work(Step(decode(batch=batch))) for batch in (1, 7))
    for single, several in zip(one, many, strict=True):
        assert several.flops == 7 * single.flops
        assert several.cache_bytes == 7 * single.cache_bytes
        assert several.activation_bytes == 7 * single.activation_bytes
        assert several.weight_bytes == single.weight_bytes


@pytest.mark.parametrize("tokens", [1, 3, 50])
def test_routed_experts_read_the_expected_distinct_ones(tokens):
    works = step_work(Step(decode(batch=tokens, ffn=lambda layer: moe_ffn(f"layers.{layer}.ffn"))))
    expected = 8 * (1 - (1 - 2 / 8) ** tokens)
    for work in works:
        if work.experts:
            assert work.weight_bytes == pytest.approx(work.expert_bytes * expected / 8)
            assert work.weight_bytes_of(10**6) == pytest.approx(work.expert_bytes)


def test_moe_bounds_name_floor_expected_and_ceiling():
    trace = decode(batch=3, ffn=lambda layer: moe_ffn(f"layers.{layer}.ffn"))
    totals = introspect.analyze("roofline", trace).totals
    assert totals["weight_bytes_read_floor"] < totals["weight_bytes_read"] < totals["weight_bytes_read_ceiling"]
    row = gpu_row(trace)
    assert row["seconds_floor"] < row["seconds"] < row["seconds_ceiling"]
    machine = Machine(gpu=find_gpus(("h100-sxm",))[0])
    added = totals["weight_bytes_read_ceiling"] - totals["weight_bytes_read"]  # every op here is bound by memory
    assert row["seconds_ceiling"] - row["seconds"] == pytest.approx(machine.memory_seconds(added))


def test_llama_3_8b_decode_turns_compute_bound():
    row = gpu_row(LLAMA, phase="decode", context=128, offline=True)
    # 15.01 GB / 3.35 TB/s = B x 15.01 G / 989.4 T
    assert row["crossover_batch"] == 296
    # each sequence computes 15.24 us (129 keys) and reads 5.01 us of cache: 4480 / 10.23
    assert row["crossover_batch_with_kv"] == 438
    # 15.17 us / (39.13 - 0.53) ns a token
    assert row["max_compute_bound_context"] == 393
    assert row["crossover_fits"]


def test_the_crossover_is_where_the_two_times_meet(slow):
    step = Step(decode())
    row = gpu_row(step.trace, **slow)
    weights = sum(work.weight_bytes for work in step_work(step) if work.flops)
    flops = step.weight_flops()
    below, at = row["crossover_batch"] - 1, row["crossover_batch"]
    assert below * flops / 1e12 < weights / 1e10 <= at * flops / 1e12


def test_beyond_the_largest_context_no_batch_is_enough(slow):
    largest = gpu_row(decode(), **slow)["max_compute_bound_context"]
    assert gpu_row(decode(context=largest), **slow)["crossover_batch_with_kv"] is not None
    assert gpu_row(decode(context=largest + 1), **slow)["crossover_batch_with_kv"] is None
    assert gpu_row(decode(context=largest + 1), **slow)["crossover_fits"] is None


def test_absorbed_latent_attention_can_be_compute_bound_at_any_context(tmp_path):
    fast_memory = {
        "memory_bytes": 1e9,
        "bandwidth_bytes_per_second": 1e14,
        "dense_peak_per_second": {"bf16": 1e14},
        "source_url": "https://vendor.example/sheet",
        "retrieved": "2026-01-31",
    }
    path = tmp_path / "gpus.json"
    path.write_text(json.dumps({"gpus": {"fast": fast_memory}}))
    trace = latent_model(phase="decode", seq=1, context=100)
    assert gpu_row(trace, gpu="fast", gpu_file=str(path))["max_compute_bound_context"] is None


def test_capacity_counts_weights_and_cache(slow):
    trace = decode()
    step = Step(trace)
    row = gpu_row(trace, **slow)
    assert row["max_batch"] == (10**9 - step.weight_bytes) // (11 * 128)
    assert row["fits"]
    assert not gpu_row(trace, utilization=1e-5, **slow)["fits"]


def test_prefill_has_no_crossover():
    row = gpu_row(llama(seq=100))
    assert [row[name] for name in ("crossover_batch", "crossover_batch_with_kv", "max_compute_bound_context")] == [
        None
    ] * 3
    assert row["tokens_per_second"] == pytest.approx(100 / row["seconds"])


def test_measured_time_gives_shares_of_the_full_peaks(slow):
    trace = decode()
    works = step_work(Step(trace))
    row = gpu_row(trace, measured=0.5, mfu=0.5, **slow)
    assert row["measured_mfu"] == pytest.approx(sum(work.flops for work in works) / 1e12 / 0.5)
    assert row["measured_mbu"] == pytest.approx(sum(work.bytes for work in works) / 1e10 / 0.5)
    assert "measured_mfu" not in gpu_row(trace, **slow)


def test_an_unknown_rate_is_no_number():
    result = introspect.analyze("roofline", decode(), gpu="t4")
    (row,) = result.tables["gpus"].rows
    assert [row[name] for name in ("seconds", "bound", "crossover_batch", "ridge_flop_per_byte")] == [None] * 4
    assert any("t4 lists no bf16 rate" in note for note in result.notes)
    assert result.figure is None


def test_the_rule_of_thumb_stands_beside():
    result = introspect.analyze("roofline", LLAMA, phase="decode", context=1, offline=True)
    (row,) = result.tables["gpus"].rows
    assert row["seconds_floor"] == pytest.approx(15.01e9 / 3.35e12, rel=1e-3)
    assert row["seconds_whole_weights"] == pytest.approx(16.06e9 / 3.35e12, rel=1e-3)
    assert any("16,060,522,496" in note for note in result.notes)


def test_every_hardware_figure_is_listed_as_assumed():
    result = introspect.analyze("roofline", decode(), gpu=("h100-sxm", "mi300x"), mfu=0.5)
    assert [row["gpu"] for row in result.tables["gpus"].rows] == ["h100-sxm", "mi300x"]
    text = "\n".join(result.assumptions)
    assert "h100-sxm: 989.4 TFLOP/s dense in bf16, 3.35 TB/s, 80 GB (https://" in text
    assert "mi300x: 1.307 PFLOP/s" in text
    assert "of peak 0.5 (--mfu)" in text


def test_the_figure_puts_every_op_on_or_under_the_roof():
    figure = introspect.analyze("roofline", decode(batch=50)).figure
    (panel,) = figure.panels
    roof = panel.series[0].xy
    slope = roof[0][1] / roof[0][0]
    for series in panel.series:
        if series.style == "points":
            assert all(rate <= min(x * slope, roof[-1][1]) * (1 + 1e-9) for x, rate in series.xy)


@given(st.integers(1, 10**9))
def test_smallest_finds_the_first(threshold):
    assert smallest(lambda n: n >= threshold) == threshold


def test_smallest_gives_up():
    assert smallest(lambda n: n > 4 * FAR) is None


def test_times_add_up_and_one_unknown_makes_the_sum_unknown():
    (gpu,) = find_gpus(("v100",))
    machine = Machine(gpu=gpu)
    known = Work(module="a", kind="linear", dtype="fp16", times=1, flops=10**12, weight_bytes=1e9)
    unknown = Work(module="b", kind="linear", dtype="bf16", times=1, flops=1)
    assert total_seconds([known, known], machine) == pytest.approx(2 * max(1e12 / 125e12, 1e9 / 900e9))
    assert total_seconds([known, unknown], machine) is None
