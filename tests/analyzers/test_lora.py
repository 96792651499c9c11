"""The adapter command: published counts, laws, errors."""

from __future__ import annotations

import pytest
from peft import LoraConfig, get_peft_model
from support.tiny import build, record

import introspect
from introspect.errors import OptionError

LLAMA = "meta-llama/Meta-Llama-3-8B"


@pytest.fixture(scope="module")
def attention():
    return introspect.analyze("lora", LLAMA, rank=16, target=("attention",), seq=256)


def test_published_counts_of_llama_3_8b(attention):
    # 16 x 32 x (8192 + 5120 + 5120 + 8192): q, k, v, o
    assert attention.totals["params"] == 13_631_488
    assert attention.totals["state_bytes"] == 16 * 13_631_488
    # and gate, up, down: 3 x (4096 + 14336)
    assert introspect.analyze("lora", LLAMA, rank=16, seq=256).totals["params"] == 41_943_040


def test_extra_flops_by_hand(attention):
    rows = {row["module"].rpartition(".")[2]: row for row in attention.tables["matrices"].rows}

    assert rows["q_proj"]["extra_flops_share"] == 16 * 8192 / 4096**2
    assert rows["k_proj"]["extra_flops_share"] == 16 * 5120 / (4096 * 1024)
    assert sum(row["params"] for row in rows.values()) == attention.totals["params"]


def test_the_recorded_step_adds_what_arithmetic_says(attention):
    """Forward and weight gradients of the adapters and dX through them, but no weight gradient of the base."""
    weights, attention_flops = 7_504_658_432, 4 * 32 * 128 * 256 * 32
    # dX is not needed below the first adapters: not of q, k and v of layer 0 nor of their adapters' A.
    unneeded = 2 * (4096 * (4096 + 1024 + 1024) + 3 * 16 * 4096)
    expected = 4 * weights + 6 * 13_631_488 + attention_flops * 7 // 2 - unneeded

    assert attention.totals["flops_per_token"] == expected
    assert attention.totals["activation_bytes"] < attention.totals["activation_bytes_full"]


def test_a_base_in_another_format():
    plain, nf4 = (
        introspect.analyze("lora", LLAMA, target=("attention",), base=base, seq=256).totals for base in ("bf16", "nf4")
    )

    assert plain["base_bytes"] == 2 * 8_030_261_248
    assert nf4["base_bytes"] == introspect.analyze("quant", LLAMA, only="nf4").tables["formats"].rows[0]["weight_bytes"]
    assert nf4["activation_bytes"] == plain["activation_bytes"]


def test_many_adapters_share_one_base(attention):
    base, own = attention.totals["base_bytes"], attention.totals["adapter_bytes"]

    for row in attention.tables["serving"].rows:
        assert row["merged_bytes"] == row["adapters"] * base
        assert row["unmerged_bytes"] == base + row["adapters"] * own


def test_what_fits_is_base_states_and_activations(attention):
    (row,) = attention.tables["gpus"].rows

    assert row["train_bytes"] == sum(attention.totals[n] for n in ("base_bytes", "state_bytes", "activation_bytes"))
    assert row["fits"] == (row["train_bytes"] <= 80e9)


def test_targets_by_end_and_by_pattern(tiny_config):
    by_end, by_pattern, both = (
        introspect.analyze("lora", tiny_config, rank=1, target=target, seq=16).totals["params"]
        for target in (("q_proj",), ("*layers.0*",), ("q_proj", "*layers.0*"))
    )

    assert by_end == 2 * (32 + 32)
    # layer 0: q, o [32, 32], k, v [16, 32], gate, up, down of width 64
    assert by_pattern == 2 * 64 + 2 * 48 + 3 * 96
    assert both == by_end + by_pattern - 64


def test_a_target_that_names_nothing_is_refused(tiny_config):
    with pytest.raises(
        OptionError, match=r"--target: got 'c_attn', expected attention, all-linear, or a pattern .* q_proj"
    ):
        introspect.analyze("lora", tiny_config, target="c_attn", seq=16)


def test_a_tied_head_gets_none():
    model = build("Llama", tie_word_embeddings=True)
    modules = {row["module"] for row in introspect.analyze("lora", model, rank=1, seq=16).tables["matrices"].rows}

    assert "lm_head" not in modules
    assert len(modules) == 7


def test_stacked_experts_are_named():
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2}
    result = introspect.analyze("lora", build("Mixtral", **sizes), rank=1, seq=16)

    (note,) = (note for note in result.notes if note.startswith("not covered"))
    assert "model.layers.*.mlp.experts.gate_up_proj" in note
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=1, target_modules=[], target_parameters=stacks)
    theirs = get_peft_model(build("Mixtral", **sizes), config, low_cpu_mem_usage=True)
    assert f"would add {sum(p.numel() for p in theirs.parameters() if p.requires_grad):,} parameters" in note
    assert not any("experts" in row["module"] for row in result.tables["matrices"].rows)


def test_a_stored_record_knows_all_but_the_step_with_adapters():
    result = introspect.analyze("lora", record(build("Llama"), phase="train", seq=12), rank=2)

    assert result.totals["params"] > 0
    assert (result.totals["activation_bytes"], result.totals["flops_per_token"]) == (None, None)
    assert result.tables["gpus"].rows[0]["fits"] is None


def test_every_adapted_linear_of_a_text_model_runs():
    result = introspect.analyze("lora", build("Llama"), rank=2, seq=16)
    parts = introspect.analyze("train", build("Llama"), seq=16).tables["flops"].rows
    executed = sum(part["flops_per_token"] for part in parts if part["part"].endswith(" forward"))

    assert result.totals["extra_flops_share"] == 2 * result.totals["params"] / executed


def phimoe():
    return build("Phimoe", num_local_experts=4, num_experts_per_tok=2)


def test_a_router_that_is_a_linear_by_class_is_counted_and_named():
    """PEFT targets it too, and its own forward then fails: a router returns no product."""
    result = introspect.analyze("lora", phimoe(), rank=8, seq=16)
    theirs = get_peft_model(phimoe(), LoraConfig(r=8, target_modules="all-linear"), low_cpu_mem_usage=True)

    assert result.totals["params"] == sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    assert (result.totals["flops_per_token"], result.totals["activation_bytes"]) == (None, None)
    assert result.totals["flops_per_token_full"] > 0
    (note,) = (note for note in result.notes if note.startswith("the step with adapters is not known"))
    assert "PhimoeTopKRouter at model.layers.0.mlp.router is a Linear by class but returns no product" in note


def test_without_any_target_there_is_nothing_to_count(tiny_config):
    with pytest.raises(OptionError, match=r"--target: got \(\), expected attention, all-linear, or a pattern"):
        introspect.analyze("lora", tiny_config, target=(), seq=16)


def test_parameters_grow_with_the_rank(tiny_config):
    one, eight = (introspect.analyze("lora", tiny_config, rank=r, seq=16).totals["params"] for r in (1, 8))

    assert eight == 8 * one
