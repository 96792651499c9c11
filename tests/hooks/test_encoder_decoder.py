from __future__ import annotations

import pytest
import torch
import transformers
from accelerate import init_empty_weights
from support.tiny import record
from torch import nn

from introspect.errors import OptionError
from introspect.hooks.routes import gather_routes
from introspect.hooks.twin import run_twin
from introspect.records import Trace

WIDTH, HEADS, INNER, VOCABULARY = 64, 4, 128, 128


def build(name: str) -> nn.Module:
    sizes = {"d_model": WIDTH, "vocab_size": VOCABULARY, "decoder_start_token_id": 0}
    own = {
        "T5": {"d_kv": 16, "d_ff": INNER, "num_layers": 2, "num_heads": HEADS},
        "Bart": {
            **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
            **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), INNER),
            **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
        },
    }[name]
    config = getattr(transformers, f"{name}Config")(**sizes, **own)
    with init_empty_weights(include_buffers=True):
        return getattr(transformers, f"{name}ForConditionalGeneration")(config).to(torch.float32).eval()


def weight_flops(trace: Trace) -> int:
    return sum(g.flops * times for op, times in trace.walk() for g in op.gemms if g.kind == "linear")


@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_a_prefill_encodes_as_many_tokens_as_it_decodes(name):
    trace = record(build(name), batch=2, seq=8)

    encoder = 2 * (4 * WIDTH * WIDTH + 2 * WIDTH * INNER)
    decoder = 2 * (8 * WIDTH * WIDTH + 2 * WIDTH * INNER) + WIDTH * VOCABULARY
    assert weight_flops(trace) == 2 * 16 * (encoder + decoder)
    said = "an encoder-decoder: 8 tokens a sequence went through its encoder, as many as its decoder reads"
    assert trace.assumptions == (said,)


@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_a_step_on_a_cache_does_not_encode_again(name):
    trace = record(build(name), phase="decode", context=24)

    # q, k, v and o of the decoder, q and o across, the FFN: the encoder's keys and values are cached
    assert weight_flops(trace) == 2 * (2 * (6 * WIDTH * WIDTH + 2 * WIDTH * INNER) + WIDTH * VOCABULARY)
    keys = {g.n for op, _ in trace.walk() for g in op.gemms if g.kind == "attention_qk"}
    assert keys == {25, 24}
    shapes = {(held.name, held.shape_before, held.shape_after) for held in trace.cache}
    assert ("cross.keys", (1, HEADS, 24, 16), (1, HEADS, 24, 16)) in shapes
    assert ("keys", (1, HEADS, 24, 16), (1, HEADS, 25, 16)) in shapes
    assert "24 tokens a sequence went through its encoder before the step" in trace.assumptions[0]


def test_a_small_twin_runs_the_same_calls_for_real():
    model = build("T5")

    assert run_twin(type(model), model.config).same_calls


def test_other_counters_run_both_parts():
    routes = gather_routes(build("T5"), tokens=8)

    expected = weight_flops(record(build("T5"), seq=8))
    assert [route.problem for route in routes.counters] == ["", ""]
    assert routes.counters[0].flops["matrix"] == routes.counters[1].flops["linear"] == expected


def test_an_encoder_that_reads_no_ids_asks_for_its_inputs():
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 2)
    config = transformers.WhisperConfig(**sizes, d_model=32, vocab_size=128, pad_token_id=0)
    with init_empty_weights(include_buffers=True):
        model = transformers.WhisperForConditionalGeneration(config)

    with pytest.raises(OptionError, match="its encoder reads input_features, no token ids"):
        record(model)
