"""Stored formats of several models at once."""

from __future__ import annotations

from transformers import LlamaConfig

from introspect.hooks.native_formats import gather
from introspect.params import AccessParams
from introspect.traces import open_model

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 8,
}


def opened(**fields):
    return open_model(LlamaConfig(**SIZES, **fields), AccessParams())


def test_one_answer_for_each_model():
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    plain, quantised = gather(None, (opened(), opened(quantization_config=fp8)))
    assert plain is None
    assert (quantised.method, quantised.problem) == ("fp8", None)
    assert quantised.parameters


def test_no_model_has_no_answer():
    assert gather(None, ()) == ()
