"""Models with a way of their own to take inputs or keep state, in both phases."""

from __future__ import annotations

import pytest
from support.architectures import architecture
from support.tiny import build, record

from introspect.hooks.shrink import build_on_meta
from introspect.records import RunShape

RECURRENT = {
    "num_hidden_layers": 3, "lru_width": 64, "attention_window_size": 8, "head_dim": 16,
    "block_types": ["recurrent", "recurrent", "attention"],
}  # fmt: skip
# A draft of two layers: 4 query heads on 1 key head; sliding layers have heads of 16, full ones of 32.
DRAFT = {
    "backbone_hidden_size": 48,
    "text_config": {
        "model_type": "gemma4_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "global_head_dim": 32, "vocab_size": 128,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 2,
    },
}  # fmt: skip


def linear_rows(trace):
    return {gemm.m for op, _ in trace.walk() for gemm in op.gemms if gemm.kind == "linear"}


def cache_shapes(trace):
    return {(held.layer, held.name): (held.shape_before, held.shape_after) for held in trace.cache}


@pytest.mark.parametrize("context", [6, 100])
def test_recurrent_gemma_shows_its_states_and_its_window_and_forgets_them(context):
    model = build("RecurrentGemma", **RECURRENT)
    trace = record(model, phase="decode", context=context)

    kept = min(context, 7)  # a window of 8 keeps 7 rows between steps
    assert cache_shapes(trace) == {
        **{(layer, "conv1d_state"): ((1, 64, 3), (1, 64, 3)) for layer in (0, 1)},
        **{(layer, "recurrent_states"): ((1, 64), (1, 64)) for layer in (0, 1)},
        **{(2, name): ((1, 2, kept, 16), (1, 2, min(context + 1, 7), 16)) for name in ("keys", "values")},
    }
    assert linear_rows(trace) == {1}
    assert model.model.layers[0].temporal_block.conv1d_state is None


def test_musicgen_takes_a_row_of_ids_for_each_codebook():
    model_class, config = architecture("musicgen")
    model = build_on_meta(model_class, config)

    assert linear_rows(record(model, seq=5, batch=3)) == {3 * 5}
    assert linear_rows(record(model, phase="decode", batch=3, context=5)) == {3}


def test_cpm_ant_is_given_all_ids_and_computes_the_new_one():
    model_class, config = architecture("cpmant", num_hidden_layers=2)
    trace = record(build_on_meta(model_class, config), phase="decode", context=9)

    assert 1 in linear_rows(trace)
    # its prompt of 32 tokens is cached with the 9
    assert {before[2] for before, _ in cache_shapes(trace).values()} == {32 + 9}


@pytest.mark.parametrize(("run", "keys"), [(RunShape(seq=6), 6), (RunShape(phase="decode", seq=1, context=20), 21)])
def test_a_draft_model_attends_its_targets_keys_with_one_token(run, keys):
    model_class, config = architecture("gemma4_assistant")
    model = build_on_meta(model_class, type(config)(**DRAFT))
    trace = record(model, phase=run.phase, seq=run.seq, context=run.context)
    calls = [op.attention for op, _ in trace.walk() if op.attention]

    assert [trace.tensors[call.k].shape for call in calls] == [(1, 1, keys, 16), (1, 1, keys, 32)]
    assert [call.query_heads for call in calls] == [4, 4]
    assert linear_rows(trace) == {1}
    assert trace.assumptions == (f"a draft model: one new token against its target's keys and values of {keys} tokens",)


def test_the_buckets_and_states_of_a_reformer_are_its_cache():
    model_class, config = architecture("reformer", attn_layers=["local", "lsh"])
    trace = record(build_on_meta(model_class, config), phase="decode", context=8)

    assert linear_rows(trace) >= {1}
    assert {before[1] for before, _ in cache_shapes(trace).values() if len(before) == 3} == {8}


def test_a_model_without_a_cache_says_that_it_runs_all_tokens_again():
    model_class, config = architecture("openai-gpt", n_layer=1)
    trace = record(build_on_meta(model_class, config), phase="decode", context=7)

    assert linear_rows(trace) == {8}
    assert "the model keeps no cache: the step runs all 8 tokens again" in trace.assumptions
