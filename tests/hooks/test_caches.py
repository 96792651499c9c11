from __future__ import annotations

import pytest
import torch
from support.tiny import build, record
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from introspect.hooks.caches import can_fill, fill, held_tensors


def prefilled(name: str, tokens: int, **sizes):
    model = build(name, device="cpu", **sizes)
    return model(input_ids=torch.ones((2, tokens), dtype=torch.int64), use_cache=True).cache


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Llama", {}),
        ("Mistral", {"sliding_window": 16}),
        ("Gemma3", {"head_dim": 16, "sliding_window": 16, "num_hidden_layers": 6}),
        ("DeepseekV3", {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
                        "v_head_dim": 8, "n_routed_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
                        "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16, "num_key_value_heads": 4}),
        ("Mamba", {"state_size": 4}),
    ],
)  # fmt: skip
def test_a_filled_cache_holds_what_a_real_prefill_leaves(name, sizes):
    filled, real = prefilled(name, 4, **sizes), prefilled(name, 40, **sizes)
    fill(filled, 36)

    def shapes(cache):
        return [(h.layer, h.layer_class, h.name, h.tensor.shape, h.tensor.dtype) for h in held_tensors(cache)]

    assert shapes(filled) == shapes(real)
    if name != "Mamba":
        assert filled.get_seq_length() == real.get_seq_length() == 40


def test_states_are_told_from_keys_and_values():
    assert {h.is_state for h in held_tensors(prefilled("Mamba", 4, state_size=4))} == {True}
    assert {h.is_state for h in held_tensors(prefilled("Llama", 4))} == {False}


def test_a_layer_class_of_another_library_is_not_filled():
    class Compressed(DynamicLayer):
        pass

    cache = DynamicCache()
    cache.layers = [Compressed()]
    assert not can_fill(cache)
    assert not can_fill({"keys": torch.zeros(1)})
    assert can_fill(prefilled("Llama", 4))


def test_a_state_that_does_not_grow_needs_no_long_prefill():
    model = build("Rwkv", hidden_size=32, attention_hidden_size=32, intermediate_size=64)
    trace = record(model, phase="decode", context=100_000)  # token by token this would take minutes

    assert {c.shape_before for c in trace.cache} == {(1, 32, 2)}
    assert trace.run.context == 100_000
