"""The page on serving says what the commands answer."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

import introspect
from introspect.commands import load_command

PAGE = " ".join((Path(__file__).parents[1] / "docs" / "serving.md").read_text(encoding="utf-8").split())
LLAMA = "meta-llama/Meta-Llama-3-8B"


def row(command, table, model, **options):
    return introspect.analyze(command, model, offline=True, **options).tables[table].rows[0]


def test_the_crossover_is_derived_with_the_figures_of_roofline():
    found = row("roofline", "gpus", LLAMA, phase="decode", context=128)
    assert (
        f"= {found['ridge_flop_per_byte']:.1f} FLOP/B, and {found['crossover_batch']} is the first whole batch" in PAGE
    )
    assert f"= {found['crossover_batch_with_kv']} sequences" in PAGE
    assert f"= {found['max_compute_bound_context']} tokens" in PAGE


def test_the_rule_of_thumb_stands_beside_what_is_read():
    found = row("roofline", "gpus", LLAMA, phase="decode", context=1)
    assert f"= {1e3 * found['seconds_whole_weights']:.2f} ms for Llama-3-8B" in PAGE
    assert f"{1e3 * found['seconds_floor']:.2f} ms and {found['tokens_per_second']:.0f} tokens/s" in PAGE


def test_latent_attention_three_ways():
    result = introspect.analyze("kv", "deepseek-ai/DeepSeek-V3", context=2048, offline=True)
    decode = {r["method"]: r for r in result.tables["latent"].rows if r["phase"] == "decode"}
    assert f"absorbed, 70 kB and {decode['absorbed']['flops_per_token'] / 1e9:.0f} GFLOP a token" in PAGE
    assert f"5.0 MB and {decode['expanded']['flops_per_token'] / 1e9:.0f} GFLOP" in PAGE
    assert f"70 kB and {decode['re-expanded']['flops_per_token'] / 1e12:.1f} TFLOP" in PAGE


def test_paged_engines_reserve_more_than_sliding_layers_hold():
    totals = introspect.analyze("kv", "openai/gpt-oss-20b", context=8192, offline=True).totals
    held, reserved = (round(totals[name] / 1e6) for name in ("bytes_at_context", "reserved_bytes_at_context"))
    assert f"holds {held} MB and reserves {reserved} MB" in PAGE


@pytest.mark.parametrize(("model", "keys"), [(LLAMA, 28628), ("meta-llama/Meta-Llama-3-70B", 53026)])
def test_attention_reaches_the_weights_where_the_page_says(model, keys):
    totals = introspect.analyze("context", model, context=2048, offline=True).totals
    assert totals["attention_passes_weights_at"] + 1 in (keys, keys + 1)  # the new token is a key too
    assert f"{keys:,}" in PAGE


def test_every_time_of_roofline_is_explained():
    columns = introspect.analyze("roofline", LLAMA, phase="decode", offline=True).tables["gpus"].units
    assert [name for name in columns if name.startswith("seconds") and f"`{name}`" not in PAGE] == []


@pytest.mark.parametrize("command", ["kv", "context"])
def test_what_ifs_and_engine_choices_are_explained(command):
    plain = {"context", "dtype", "gpu", "gpu_file", "plot", "sequences", "sram_bytes", "page_size"}
    options = {member.name for member in fields(load_command(command).params)} - plain
    assert [name for name in options if f"--{name.replace('_', '-')}" not in PAGE] == []


def test_the_example_row_is_accepted(tmp_path):
    text = (Path(__file__).parents[1] / "docs" / "serving.md").read_text(encoding="utf-8")
    path = tmp_path / "mine.json"
    path.write_text(text.partition("```json\n")[2].partition("```")[0])
    (found,) = (r for r in introspect.analyze("gpus", gpu_file=str(path)).tables["gpus"].rows if r["gpu"] == "my-card")
    assert found["fp8_flops_per_second"] == 4 * 10**14
