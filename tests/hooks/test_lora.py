"""Adapters in a recorded step: the matrices PEFT makes, and the step that PEFT would train."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.tiny import IDENTITY, build, record
from transformers import GPT2Config, GPT2LMHeadModel

from introspect.hooks.lora import adapted, is_linear
from introspect.hooks.observe import observe
from introspect.records import RunShape

RANK = 4
EVERY = ("*",)


def gpt2():
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, vocab_size=512, bos_token_id=1, eos_token_id=1)
    with torch.device("meta"):
        return GPT2LMHeadModel(config).eval()


MODELS = {
    "Llama": (lambda: build("Llama"), ("*_proj",)),
    "Gemma2": (lambda: build("Gemma2", head_dim=16), ("*_proj",)),
    "GPT2": (gpt2, ("*c_attn", "*c_proj", "*c_fc")),
    "GptOss": (lambda: build("GptOss", head_dim=16, num_local_experts=4, num_experts_per_tok=2), ("*_proj",)),
}


def adapters(trace):
    return Counter(p.shape for p in trace.parameters if "lora_" in p.path)


@pytest.mark.parametrize("name", MODELS)
def test_the_same_matrices_as_peft_makes(name):
    make, patterns = MODELS[name]
    trace = record(make(), phase="train", seq=8, lora_rank=RANK, lora_targets=patterns)
    theirs = get_peft_model(make(), LoraConfig(r=RANK, target_modules="all-linear"), low_cpu_mem_usage=True)

    expected = Counter(tuple(p.shape) for path, p in theirs.named_parameters() if "lora_" in path)
    assert adapters(trace) == expected
    assert sum(expected.values()) > 0


def test_the_step_is_the_one_peft_trains():
    """Products of forward and backward, by size, with the adapters in the base's dtype."""
    ours = record(build("Llama"), phase="train", seq=8, lora_rank=RANK, lora_targets=("*_proj",))
    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", lora_dropout=0.0)
    theirs = get_peft_model(build("Llama"), config, low_cpu_mem_usage=True).base_model.model
    theirs = observe(theirs, IDENTITY, RunShape(phase="train", seq=8))

    assert products(ours) == products(theirs)


def products(trace):
    return Counter((g.kind, g.direction, g.m, g.k, g.n) for op in trace.ops for g in op.gemms)


def test_only_adapters_get_weight_gradients():
    trace = record(build("Llama"), phase="train", seq=8, lora_rank=RANK, lora_targets=("*q_proj",))
    modules = {op.module for op in trace.ops for g in op.gemms if g.direction == "dw"}

    assert modules == {f"model.layers.{layer}.self_attn.q_proj.lora_{part}" for layer in (0, 1) for part in "AB"}


def test_meta_equals_a_real_step():
    on_meta, real = (
        record(build("Llama", device=device), phase="train", seq=12, lora_rank=RANK, lora_targets=("*_proj",))
        for device in ("meta", "cpu")
    )

    assert products(on_meta) == products(real)
    assert on_meta.saved_bytes == real.saved_bytes
    assert on_meta.saved_bytes < record(build("Llama"), phase="train", seq=12).saved_bytes


def test_the_model_is_left_as_it_was():
    model = build("Llama")
    before = [(path, p.requires_grad) for path, p in model.named_parameters()]
    with adapted(model, RunShape(phase="train", lora_rank=RANK, lora_targets=EVERY)):
        assert not model.model.embed_tokens.weight.requires_grad
        assert model.model.layers[0].mlp.up_proj.lora_A.weight.requires_grad

    assert [(path, p.requires_grad) for path, p in model.named_parameters()] == before
    assert not any(module._forward_hooks for module in model.modules())


def test_without_a_rank_nothing_happens():
    model = build("Llama")
    with adapted(model, RunShape(phase="train", lora_targets=EVERY)):
        assert all(p.requires_grad for p in model.parameters())


def test_linears_are_listed():
    trace = record(build("Llama", num_hidden_layers=1), seq=4)

    assert trace.linears == (
        *(f"model.layers.0.self_attn.{part}_proj" for part in "qkvo"),
        *(f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")),
        "lm_head",
    )
    assert is_linear(gpt2().transformer.h[0].attn.c_attn)
