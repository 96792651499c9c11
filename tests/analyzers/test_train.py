"""The training command: published figures, laws, and what its numbers are made of."""

from __future__ import annotations

import pytest
from support.tiny import build, record

import introspect
from introspect.analyzers._training import TrainingStep, flops_by_part
from introspect.errors import ModelRunError, TraceShapeError, UnknownGpuError

LLAMA = "meta-llama/Meta-Llama-3-8B"


@pytest.fixture(scope="module")
def llama():
    return introspect.analyze("train", LLAMA, seq=2048, dp=(8, 64), tokens=15 * 10**12, tokens_per_second=9000.0)


def row(result, table, **wanted):
    (found,) = (r for r in result.tables[table].rows if all(r[name] == value for name, value in wanted.items()))
    return found


def test_published_states_of_llama_3_8b(llama):
    # 16 B a parameter: 2 + 2 + 4 + 4 + 4 (ZeRO)
    assert llama.totals["state_bytes"] == 16 * 8_030_261_248
    assert row(llama, "states", item="master_weights")["bytes"] == 4 * 8_030_261_248


@pytest.mark.parametrize(("stage", "per_parameter"), [("zero1", 4 + 12 / 8), ("zero2", 2 + 14 / 8), ("zero3", 16 / 8)])
def test_zero_stages(llama, stage, per_parameter):
    found = row(llama, "sharded_states", stage=stage, dp=8)

    assert found["bytes_per_rank"] == pytest.approx(per_parameter * 8_030_261_248, rel=1e-9)


def test_flops_of_llama_3_8b_from_its_matrices(llama):
    # 2 x 7,504,924,672 weights in products, three times; attention 4 x 32 heads x 128 x 2048 x 32 layers,
    # 3.5 times: forward, backward twice, and the scores once more.
    weights, attention = 6 * 7_504_658_432, 4 * 32 * 128 * 2048 * 32

    assert llama.totals["flops_per_token"] == weights + attention * 7 // 2
    assert llama.totals["model_flops_per_token"] == weights + 3 * attention
    assert llama.totals["total_flops"] == (weights + attention * 7 // 2) * 15 * 10**12


def test_the_rule_of_six_n_stands_beside(llama):
    record_row = row(llama, "flops", part="record")
    six = row(llama, "flops", part="6N, N = parameters in products")

    assert six["flops_per_token"] == 6 * 7_504_658_432
    assert six["relative_to_record"] == pytest.approx(six["flops"] / record_row["flops"])
    parts = [r for r in llama.tables["flops"].rows if r["relative_to_record"] is None]
    assert sum(r["flops"] for r in parts) == record_row["flops"]


def test_mfu_and_hfu_by_hand(llama):
    peak = 989.4e12

    assert llama.totals["mfu"] == pytest.approx(llama.totals["model_flops_per_token"] * 9000 / peak, rel=1e-3)
    assert llama.totals["hfu"] == pytest.approx(llama.totals["flops_per_token"] * 9000 / peak, rel=1e-3)
    assert llama.totals["mfu"] < llama.totals["hfu"]


def test_activations_of_llama_3_8b(llama):
    methods = {r["method"]: r["bytes"] for r in llama.tables["activations"].rows}

    # Korthikanti et al. 2022, eq. 2: 32 layers x s b h (34 + 5 a s / h)
    assert methods["megatron_formula"] == 32 * 2048 * (34 * 4096 + 5 * 32 * 2048)
    assert methods["saved"] == methods["fused"] == llama.totals["activation_bytes"]
    assert methods["checkpointed"] < methods["saved"] < methods["materialised"]
    # 32 x 32 heads x 2048 x 2048 scores: fp32 and a bf16 copy, without the log-sum-exp; 24 of 32 heads expanded
    scores = 32 * 32 * 2048 * (2048 * 6 - 4) + 32 * 2 * 24 * 128 * 2048 * 2
    assert methods["materialised"] == methods["saved"] + scores
    assert llama.totals["logits_bytes"] == 2048 * 128256 * 4


def test_what_is_kept_adds_up(llama):
    assert sum(r["bytes"] for r in llama.tables["saved"].rows) == llama.totals["activation_bytes"]


def test_recomputation_costs_a_forward_but_for_each_layers_last_product(llama):
    # down_proj of 32 layers is not repeated, nor is the head; attention is.
    again = 2 * (7_504_658_432 - 525_336_576 - 32 * 14336 * 4096) + 4 * 32 * 128 * 2048 * 32

    assert llama.totals["flops_per_token_recompute"] == llama.totals["flops_per_token"] + again


def test_a_rank_fits_with_its_states_and_activations(llama):
    for found in llama.tables["gpus"].rows:
        assert found["fits"] == (found["state_bytes"] + found["activation_bytes"] <= 80e9)
        hours = 15e12 / 2048 * found["step_seconds"] / 3600
        assert found["gpu_hours"] == pytest.approx(hours)


def test_checkpointing_decides_hfu_and_what_fits(tiny_config):
    plain, checkpointed = (
        introspect.analyze("train", tiny_config, seq=16, tokens_per_second=1.0, checkpointing=c) for c in (False, True)
    )

    assert checkpointed.totals["hfu"] > plain.totals["hfu"]
    assert checkpointed.totals["mfu"] == plain.totals["mfu"]
    first, second = (r.tables["gpus"].rows[0]["activation_bytes"] for r in (plain, checkpointed))
    assert (first, second) == (plain.totals["activation_bytes"], plain.totals["activation_bytes_checkpointed"])


def test_one_stored_record_answers_without_checkpointing():
    result = introspect.analyze("train", record(build("Llama"), phase="train", seq=12))

    assert result.totals["activation_bytes"] > 0
    assert result.totals["activation_bytes_checkpointed"] is None
    assert result.totals["flops_per_token_recompute"] is None
    assert any("no step with checkpointing is known" in note for note in result.notes)


def test_a_record_of_another_phase_is_refused():
    with pytest.raises(TraceShapeError, match="phase"):
        introspect.analyze("train", record(build("Llama"), seq=12))


def test_without_a_throughput_there_is_no_mfu(tiny_config):
    totals = introspect.analyze("train", tiny_config, seq=16).totals

    assert (totals["mfu"], totals["hfu"], totals["total_flops"]) == (None, None, None)


def test_a_throughput_beyond_the_peak_is_named(tiny_config):
    for rate, named in ((1e15, True), (1.0, False)):
        result = introspect.analyze("train", tiny_config, seq=16, tokens_per_second=rate)
        assert any("hfu is above 1: no h100-sxm runs this step" in note for note in result.notes) is named


def test_mfu_counts_the_experts_a_token_chose():
    """This code multiplies 4 experts of 64 x 64 and 64 x 32 for each token, of which it needs one, in 2 layers."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 32, "head_dim": 16}
    result = introspect.analyze("train", build("Llama4", **sizes), seq=16)
    again = row(result, "flops", part="attention scores again")["flops_per_token"]
    unchosen = 6 * 2 * 3 * (64 * 64 + 64 * 32)

    assert result.totals["flops_per_token"] - result.totals["model_flops_per_token"] == unchosen + again
    assert any(f"{unchosen:,} FLOP a token that MFU leaves out" in note for note in result.notes)
    needed = row(result, "flops", part="record, chosen experts alone")["flops_per_token"]
    assert needed == result.totals["flops_per_token"] - unchosen


def test_a_step_that_cannot_be_recomputed_leaves_the_plain_figures():
    plain = record(build("Llama"), phase="train", seq=12)

    def traces(run):
        if run.checkpointing:
            raise ModelRunError("tiny", "train", "CheckpointError: other values", "the model")
        return plain

    step = TrainingStep(plain.run, traces)

    assert step.flops_per_token > 0
    assert (step.recompute_flops_per_token, step.checkpointed_bytes) == (None, None)
    assert step.problem == "the run failed at the model: CheckpointError: other values"


def test_unknown_gpus_are_refused(tiny_config):
    with pytest.raises(UnknownGpuError):
        introspect.analyze("train", tiny_config, seq=16, gpu="h1000")


def test_flops_are_linear_in_the_batch():
    model = build("Llama")
    one, three = (flops_by_part(record(model, phase="train", batch=b, seq=12)) for b in (1, 3))

    assert three == {part: 3 * count for part, count in one.items()}


def test_dropout_noise_is_named():
    result = introspect.analyze("train", record(build("Phi3", pad_token_id=0, resid_pdrop=0.1), phase="train", seq=12))

    # four dropouts [12, 64] in fp32: 3 bytes each less as masks
    assert any(f"{4 * 12 * 64 * 3:,} B less" in note for note in result.notes)
