"""Small transformers models built from class and sizes, on meta or with real random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import nn

from introspect.hooks.observe import observe
from introspect.records import ModelIdentity, RunShape, Trace

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
# Classes whose config has another stem.
CONFIGS = {"Gemma3": "Gemma3Text", "Gemma4": "Gemma4Text", "Gemma3n": "Gemma3nText", "Llama4": "Llama4Text"}
CLASSES = {"GPT2": "GPT2LMHeadModel", "Bert": "BertLMHeadModel"}  # classes that are called otherwise
IDENTITY = ModelIdentity(id="tiny", class_name="Tiny", source="test", config_sha256="", config={})


def build(name: str, *, device: str = "meta", dtype: torch.dtype = torch.float32, **sizes: Any) -> nn.Module:
    """`name` is a class stem: Llama gives LlamaForCausalLM of LlamaConfig(**LLAMA, **sizes)."""
    config = getattr(transformers, f"{CONFIGS.get(name, name)}Config")(**{**LLAMA, **sizes})
    model_class = getattr(transformers, CLASSES.get(name, f"{name}ForCausalLM"))
    if device == "meta":
        with init_empty_weights(include_buffers=True):
            return model_class(config).to(dtype).eval()
    torch.manual_seed(0)
    return model_class(config).to(dtype).eval()


def record(model: nn.Module, **run: Any) -> Trace:
    """One observed run."""
    shape = RunShape(**{"seq": 8, **run})
    if shape.phase == "decode":
        shape = shape.with_(seq=1)
    return observe(model, IDENTITY, shape)


def products(trace: Trace) -> dict[str, int]:
    """FLOPs by kind of product."""
    found: dict[str, int] = {}
    for op, times in trace.walk():
        for gemm in op.gemms:
            found[gemm.kind] = found.get(gemm.kind, 0) + gemm.flops * times
    return found
