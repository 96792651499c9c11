"""Position encodings named from the graph of tiny models of every kind."""

from __future__ import annotations

import pytest
from support.tiny import build, record

from introspect.analyzers._positions import Positions
from introspect.analyzers._step import Step

DECODER = {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 64}
WHISPER = DECODER | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "max_target_positions": 64}
PEGASUS = DECODER | {"is_decoder": True, "max_position_embeddings": 64}
GPT2 = {"n_embd": 32, "n_head": 2, "n_layer": 2}


def positions(name, phase, **sizes):
    trace = record(build(name, **sizes), phase=phase, context=8 if phase == "decode" else 0)
    return Positions(Step(trace).structure)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("name", "sizes", "rows"),
    [
        ("Llama", {}, [("rope", "0-1")]),
        ("GPTJ", {"n_embd": 32, "n_head": 2, "n_layer": 2, "rotary_dim": 8}, [("rope", "0-1")]),
        ("GPT2", GPT2, [("learned", "0-1")]),
        ("OPT", {"ffn_dim": 32, "word_embed_proj_dim": 64, "max_position_embeddings": 64}, [("learned", "0-1")]),
        ("Bert", {"is_decoder": True, "max_position_embeddings": 64}, [("learned", "0-1")]),
        ("Bloom", {"n_layer": 2, "n_head": 2}, [("alibi", "0-1")]),
        ("Mpt", {"d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": 64}, [("alibi", "0-1")]),
        ("Falcon", {"alibi": True, "num_kv_heads": 4}, [("alibi", "0-1")]),
        ("XGLM", {"d_model": 32, "ffn_dim": 32, "num_layers": 2, "attention_heads": 2}, [("sinusoidal", "0-1")]),
        ("Mamba", {"state_size": 8}, [("none", "0-1")]),
        ("RoFormer", {"is_decoder": True, "embedding_size": 64, "max_position_embeddings": 64}, [("rope", "0-1")]),
        ("Whisper", WHISPER, [("learned", "0-1")]),
        ("Pegasus", PEGASUS, [("sinusoidal", "0-1")]),
        ("Marian", PEGASUS | {"decoder_vocab_size": 512, "pad_token_id": 0}, [("sinusoidal", "0-1")]),
        ("SmolLM3", {"no_rope_layers": [1, 0], "pad_token_id": 0}, [("rope", "0"), ("none", "1")]),
    ],
)
def test_kind_of_every_layer(name, sizes, rows, phase):
    assert positions(name, phase, **sizes).rows() == rows


def test_layers_of_each_set_of_frequencies():
    sizes = {
        "head_dim": 16,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 8,
    }
    trace = record(build("Gemma3", **sizes), phase="decode", context=16)
    found = Positions(Step(trace).structure)
    assert {rope.layer_type: found.layers_of(rope) for rope in trace.rope} == {
        "full_attention": "1",
        "sliding_attention": "0,2",
    }
