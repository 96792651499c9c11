"""Costs against the context, wavelengths and what-ifs."""

from __future__ import annotations

import math

import pytest
from support.tiny import build

import introspect
from introspect.analyzers._rope import incomplete_pairs, wavelength
from introspect.errors import OptionError
from introspect.records import Rope

LLAMA = "meta-llama/Meta-Llama-3-8B"


@pytest.fixture(scope="module")
def tiny():
    """4 heads of 16 on 2 key heads, 2 layers, training length 2048, base 10000."""
    return build("Llama")


def context(model, **options):
    return introspect.analyze("context", model, no_cache=True, **options)


def test_a_row_by_hand(tiny):
    (row,) = context(tiny, context=100, sram_bytes=4 * 4 * 16 * 10).tables["lengths"].rows
    weights = 2 * 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160) + 2 * 64 * 512
    pairs = 2 * 2 * 2 * 4 * 16  # two layers, two products, four heads of 16: FLOPs of one (query, key) pair
    assert row["prefill_flops"] == 100 * weights + 5050 * pairs
    assert row["prefill_engine_flops"] == row["prefill_flops"] - 99 * 2 * 64 * 512
    assert row["prefill_attention_share"] == pytest.approx(5050 * pairs / row["prefill_flops"])
    assert row["decode_attention_flops"] == 101 * pairs
    assert row["decode_flops"] == weights + 101 * pairs
    assert row["kv_bytes"] == 100 * 2 * 2 * 2 * 16 * 4
    assert row["score_bytes_per_layer"] == 4 * 100 * 100 * 4
    # blocks of 10 query rows: 10 passes over keys and values, of which the mask lets 50.5 % through
    assert row["flash_bytes_per_layer"] == 4 * 16 * round(2 * 100 + 2 * 100 * 10 * 0.505) * 4


def test_crossing_of_llama_3_8b():
    totals = context(LLAMA, context=8192, offline=True).totals
    # 4 x 4096 x 32 FLOPs for each of c + 1 keys reach 15,009,316,864 at c + 1 = 28628.0 tokens
    assert totals["attention_passes_weights_at"] == math.ceil(15_009_316_864 / 524_288) - 1
    assert totals["rope_pairs_incomplete"] == 29


def test_ttft_is_the_bound_of_roofline():
    (row,) = context(LLAMA, context=2048, mfu=0.6, offline=True).tables["lengths"].rows
    (bound,) = introspect.analyze("roofline", LLAMA, seq=2048, mfu=0.6, offline=True).tables["gpus"].rows
    assert row["ttft_seconds"] == bound["seconds"]


def test_several_lengths_and_gpus(tiny):
    rows = context(tiny, context=(16, 64), gpu=("h100-sxm", "a100-80g"), dtype="bf16").tables["lengths"].rows
    assert [(row["context"], row["gpu"]) for row in rows] == [
        (16, "h100-sxm"),
        (16, "a100-80g"),
        (64, "h100-sxm"),
        (64, "a100-80g"),
    ]
    assert rows[0]["ttft_seconds"] < rows[1]["ttft_seconds"]


def test_attention_of_a_sliding_model_never_passes_its_weights():
    assert context(build("Mistral", sliding_window=8), context=64).totals["attention_passes_weights_at"] is None


def test_wavelengths_of_every_pair(tiny):
    rows = context(tiny, context=16).tables["rope"].rows
    assert [row["wavelength_tokens"] for row in rows] == pytest.approx(
        [2 * math.pi * 10000 ** (2 * pair / 16) for pair in range(8)], rel=1e-5
    )
    assert rows[0]["layers"] == "0-1"
    assert rows[0]["turns_in_training_length"] == pytest.approx(2048 / (2 * math.pi))


def test_what_if_scalings_are_overlaid(tiny):
    result = context(tiny, context=8192, rope=("linear:4", "yarn:4"))
    rows = result.tables["rope_what_if"].rows
    assert [row["scaling"] for row in rows] == ["linear:4"] * 8 + ["yarn:4"] * 8
    assert rows[3]["wavelength_tokens"] == pytest.approx(4 * rows[3]["unscaled_wavelength_tokens"])
    assert rows[8]["attention_factor"] == pytest.approx(0.1 * math.log(4) + 1)
    assert "yarn:4 scales cosines and sines by 1.13863, so scores by its square" in result.notes
    labels = [series.label for series in result.figure.panels[0].series]
    assert labels == ["default, base 10000", "linear:4, base 10000", "yarn:4, base 10000", "training length 2,048"]


def test_sets_of_frequencies_that_layer_types_share_are_drawn_once():
    sizes = {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    base = {"rope_type": "default", "rope_theta": 10000.0}
    ropes = {"sliding_attention": base, "full_attention": {**base, "rope_theta": 1000000.0}}
    same = context(build("Gemma3", **sizes, rope_parameters=dict.fromkeys(ropes, base)), context=16, rope=("yarn:4",))
    other = context(build("Gemma3", **sizes, rope_parameters=ropes), context=16)
    labels = [[series.label for series in result.figure.panels[0].series[:2]] for result in (same, other)]
    assert labels == [
        ["default, base 10000", "yarn:4, base 10000"],
        ["default, base 1e+06 (full_attention)", "default, base 10000 (sliding_attention)"],
    ]


@pytest.mark.parametrize("text", ["yarn", "yarn:0.5", "yarn:x", "pi:4", "yarn:inf", ":4", "yarn:4:2"])
def test_a_scaling_that_is_none_is_refused(tiny, text):
    with pytest.raises(OptionError, match=r"--rope: got .*, expected NAME:FACTOR with a name of linear, ntk, yarn"):
        context(tiny, rope=(text,))


def test_what_if_windows_and_chunks(tiny):
    result = context(tiny, context=100, window=10, sinks=2, chunk=25)
    (row,) = result.tables["lengths"].rows
    window, chunk = result.tables["what_if"].rows
    assert (window["variant"], chunk["variant"]) == ("window 10 + 2 sinks", "chunk 25")
    assert window["decode_attention_flops"] == row["decode_attention_flops"] * 12 // 101
    assert chunk["decode_attention_flops"] == row["decode_attention_flops"] // 101  # a new chunk begins at 100
    assert window["kv_bytes"] == row["kv_bytes"] * 12 // 100
    assert window["prefill_flops"] < row["prefill_flops"]


def test_sinks_without_a_window_are_refused(tiny):
    with pytest.raises(OptionError, match=r"--sinks: got 4, expected a --window"):
        context(tiny, sinks=4)


def test_a_model_without_rope_has_no_table_of_it():
    result = context(build("GPT2", n_embd=32, n_head=2, n_layer=2), context=16)
    assert "rope" not in result.tables
    assert result.tables["position"].rows == ({"position": "learned", "layers": "0-1"},)
    assert [panel.title for panel in result.figure.panels] == ["FLOPs of one decoded token", "Cache of one sequence"]


def test_recurrent_layers_have_none():
    assert context(build("Mamba"), context=16).tables["position"].rows == ({"position": "none", "layers": "0-1"},)


def test_a_pair_that_is_not_rotated_has_no_wavelength():
    rope = Rope(
        module="rotary",
        layer_type=None,
        rope_type="proportional",
        base=1e4,
        dim=4,
        training_length=100,
        attention_factor=1.0,
        inv_freq=(1.0, 0.01, 0.0),
        unscaled_inv_freq=(1.0, 0.01, 0.0001),
    )
    assert wavelength(0.0) is None
    assert incomplete_pairs(rope) == 1  # 100 x 0.01 is less than a turn; the last pair does not turn at all
