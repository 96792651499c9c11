"""The speculation command: published figures, its two ends, and where a draft comes from."""

from __future__ import annotations

from itertools import pairwise

import pytest
from support.tiny import build, record

import introspect
from introspect.analyzers._roofline import step_work
from introspect.analyzers._speculation import scan_flops
from introspect.analyzers._step import Step
from introspect.errors import OptionError

LLAMA = "meta-llama/Meta-Llama-3-8B"


@pytest.fixture(scope="module")
def llama():
    return introspect.analyze("speculate", LLAMA, alpha=0.8, gamma=4, draft_cost=0.1, context=1)


def test_published_figures_of_leviathan(llama):
    # (1 - 0.8^5) / 0.2 tokens; memory-bound, a verify step costs a decode step: 3.3616 / (4 x 0.1 + 1)
    assert llama.totals["expected_tokens"] == pytest.approx(3.3616)
    assert llama.totals["speedup"] == pytest.approx(3.3616 / 1.4, rel=0.01)
    assert llama.totals["best_gamma"] == 6  # (1 - 0.8^7) / 0.2 / 1.6 = 2.470


def test_the_gain_fades_with_the_batch(llama):
    gains = [row["speedup"] for row in llama.tables["batches"].rows]

    # weights alone: 5 B x 15.01 GFLOP / 989 TFLOP/s = 2.9616 x 4.48 ms at B = 175
    assert 150 <= llama.totals["breakeven_batch"] <= 200
    assert all(later <= earlier + 1e-3 for earlier, later in pairwise(gains))
    assert gains[-1] < 1 < gains[0]


def test_alpha_zero_and_one(tiny_config):
    none, every = (
        introspect.analyze("speculate", tiny_config, alpha=a, gamma=4, draft_cost=0.1).totals for a in (0.0, 1.0)
    )

    assert (none["expected_tokens"], every["expected_tokens"]) == (1, 5)
    assert none["speedup"] < 1 < every["speedup"]
    assert (none["breakeven_batch"], none["gains"], none["best_gamma"]) == (None, "at no batch", 0)
    assert (every["breakeven_batch"], every["gains"]) == (None, "however large the batch")


def test_best_gamma_does_not_depend_on_the_gamma_asked_for(tiny_config):
    def best(gamma):
        return introspect.analyze("speculate", tiny_config, gamma=gamma, draft_cost=0.1, context=64).totals[
            "best_gamma"
        ]

    assert best(1) == best(4) == best(1000) > 0


def test_two_costs_of_one_draft_are_refused(tiny_config):
    with pytest.raises(OptionError, match=r"--draft-cost: got 0\.1, expected no --draft beside it"):
        introspect.analyze("speculate", tiny_config, draft=tiny_config, draft_cost=0.1)


def test_what_fits_is_weights_and_cache_of_both(tiny_config):
    result = introspect.analyze("speculate", LLAMA, draft=tiny_config, context=2048)
    held = {row["batch"]: row for row in result.tables["batches"].rows}
    own = introspect.analyze("params", tiny_config).totals["weight_bytes"]
    # a sequence of 2048: 131,072 B a token, and 2 layers x 2 x 2 heads x 8 x 2 B of the draft
    sequence = 2048 * (131_072 + 2 * 2 * 2 * 8 * 2)

    assert held[1]["memory_bytes"] == 2 * 8_030_261_248 + own + sequence == result.totals["memory_bytes"]
    assert held[1024]["memory_bytes"] - held[1]["memory_bytes"] == 1023 * sequence
    assert (held[1]["fits"], held[1024]["fits"], result.totals["fits"]) == (True, False, True)


def test_alpha_beyond_one_is_refused(tiny_config):
    with pytest.raises(OptionError, match=r"alpha: got 1\.1, expected a number at least 0 and at most 1"):
        introspect.analyze("speculate", tiny_config, alpha=1.1)


def test_a_draft_model_brings_its_own_decode_and_cache(tiny_config):
    result = introspect.analyze("speculate", LLAMA, draft=tiny_config, context=64)
    own = introspect.analyze("roofline", tiny_config, phase="decode", context=64).tables["gpus"].rows[0]["seconds"]

    assert result.totals["draft_seconds"] == pytest.approx(own)
    # two layers, a key and a value of 2 heads x 8 in bf16
    assert result.totals["draft_kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 2
    assert any("the vocabularies differ (128,256 and 50 rows)" in note for note in result.notes)


def test_without_a_draft_one_layer_and_the_head_stand_for_one():
    result = introspect.analyze("speculate", LLAMA, context=64)
    kinds = {row["kind"]: row for row in result.tables["kinds"].rows}

    assert "draft: one layer and the head of the target" in result.assumptions
    assert result.totals["draft_seconds"] / result.totals["decode_seconds"] == pytest.approx(
        kinds["EAGLE"]["draft_cost"]
    )
    # a layer of 218 M and the head of 525 M of 7.5 G weights
    assert kinds["EAGLE"]["draft_cost"] == pytest.approx((218_112_000 + 525_336_576) / 7_504_658_432, rel=0.02)
    assert kinds["Medusa"]["draft_cost"] == pytest.approx(525_336_576 / 7_504_658_432, rel=0.02)
    assert result.totals["draft_kv_bytes_per_token"] == result.totals["kv_bytes_per_token"] / 32


def test_kinds_are_cited(llama):
    kinds = {row["kind"]: row for row in llama.tables["kinds"].rows}

    assert all(row["source"].startswith("https://") for row in kinds.values())
    # Spec-Bench: 1.55 to 1.74 tokens a step, 1 / (1 - alpha) where nothing bounds the drafts
    assert kinds["n-gram"]["alpha_low"] == pytest.approx(1 - 1 / 1.55, abs=0.01)
    assert kinds["n-gram"]["alpha_high"] == pytest.approx(1 - 1 / 1.74, abs=0.01)
    assert kinds["n-gram"]["draft_cost"] == 0
    assert 1 < kinds["n-gram"]["speedup_low"] < kinds["n-gram"]["speedup_high"] < 1.74
    assert (
        introspect.analyze("speculate", LLAMA, context=1).tables["kinds"].rows[-1]["speedup_low"] is None
    )  # no --draft
    assert kinds["small model"]["speedup_low"] < kinds["small model"]["speedup_high"]


def test_recurrent_states_are_a_warning():
    result = introspect.analyze("speculate", build("Mamba", state_size=4), context=16, draft_cost=0.1)

    assert any("keeps recurrent states" in note for note in result.notes)


def hybrid():
    """A layer of Mamba-2 with chunks of 128, one of attention, one of an MLP."""
    sizes = {"layers_block_type": ["attention", "mamba", "mlp"], "num_hidden_layers": 3, "chunk_size": 128}
    return build("NemotronH", **sizes, mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=16, n_groups=2, head_dim=16)


def test_a_short_verify_step_scans_as_often_as_it_has_tokens():
    result = introspect.analyze("speculate", hybrid(), context=16, gamma=4)
    decode, verify = (
        scan_flops(step_work(Step(record(hybrid(), phase=phase, seq=seq, context=16))))
        for phase, seq in (("decode", 1), ("prefill", 5))
    )

    assert verify > 5 * decode > 0
    (note,) = (note for note in result.notes if note.startswith("scans of the verify step: 5 decode steps"))
    assert f"{5 * decode:,} FLOP; this code pads them to whole chunks, {verify:,} FLOP" in note


def test_a_hybrids_stand_in_draft_has_attention():
    result = introspect.analyze("speculate", hybrid(), context=16)

    assert "draft: one layer with attention and the head of the target" in result.assumptions
    # a key and a value of 2 heads x 16 in fp32
    assert result.totals["draft_kv_bytes_per_token"] == 2 * 2 * 16 * 4
