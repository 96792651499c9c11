"""Rotary frequencies against closed forms and against the tensors that a real CPU module holds."""

from __future__ import annotations

import math

import pytest
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPTJConfig, LlamaConfig, Phi3Config

from introspect.hooks.rope import gather_rope, gather_scaled_rope

TINY = {"hidden_size": 512, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 16}


def on_meta(config):
    with init_empty_weights(include_buffers=True):
        return AutoModelForCausalLM.from_config(config)


def llama(**rope):
    length = rope.pop("max_position_embeddings", 4096)
    return LlamaConfig(**TINY, max_position_embeddings=length, rope_parameters={"rope_theta": 10000.0, **rope})


def test_default_frequencies_are_the_closed_form():
    (rope,) = gather_rope(on_meta(llama(rope_type="default")), 4096)
    assert (rope.module, rope.layer_type, rope.rope_type) == ("model.rotary_emb", None, "default")
    assert (rope.base, rope.dim, rope.training_length, rope.attention_factor) == (10000.0, 128, 4096, 1.0)
    assert rope.inv_freq == pytest.approx([10000 ** (-2 * pair / 128) for pair in range(64)], rel=1e-6)
    assert rope.unscaled_inv_freq == rope.inv_freq
    # Llama 2: 2 pi 10000^(126/128)
    assert 2 * math.pi / rope.inv_freq[63] == pytest.approx(54410.1, rel=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        llama(rope_type="default"),
        llama(rope_type="linear", factor=4.0),
        llama(rope_type="dynamic", factor=4.0),
        llama(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024),
        llama(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=1024,
        ),
    ],
    ids=lambda config: config.rope_parameters["rope_type"],
)
def test_frequencies_are_those_of_a_real_module(config):
    (rope,) = gather_rope(on_meta(config), 4096)
    real = AutoModelForCausalLM.from_config(config).model.rotary_emb
    assert rope.inv_freq == tuple(real.inv_freq.tolist())
    assert rope.attention_factor == real.attention_scaling


def test_dynamic_ntk_depends_on_the_length():
    model = on_meta(llama(rope_type="dynamic", factor=2.0))
    short, long = gather_rope(model, 4096)[0], gather_rope(model, 16384)[0]
    assert short.inv_freq == short.unscaled_inv_freq
    # base' = base (2 * 16384/4096 - 1)^(128/126)
    base = 10000 * 7 ** (128 / 126)
    assert long.inv_freq == pytest.approx([base ** (-2 * pair / 128) for pair in range(64)], rel=1e-5)


def test_longrope_takes_the_long_factors_beyond_the_training_length():
    config = Phi3Config(
        **TINY,
        pad_token_id=0,
        max_position_embeddings=8192,
        original_max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 64,
            "long_factor": [2.0] * 64,
            "original_max_position_embeddings": 4096,
        },
    )
    model = on_meta(config)
    assert gather_rope(model, 4096)[0].inv_freq == gather_rope(model, 4096)[0].unscaled_inv_freq
    long = gather_rope(model, 4097)[0]
    assert long.inv_freq == pytest.approx([one / 2 for one in long.unscaled_inv_freq])
    # sqrt(1 + ln(8192/4096) / ln 4096), the paper's temperature
    assert long.attention_factor == pytest.approx(math.sqrt(1 + math.log(2) / math.log(4096)))


def test_each_layer_type_has_its_own():
    config = Gemma3TextConfig(
        **TINY | {"num_hidden_layers": 2},
        head_dim=128,
        num_key_value_heads=1,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
        },
    )
    full, sliding = gather_rope(on_meta(config), 4096)
    assert (full.layer_type, full.rope_type, full.base) == ("full_attention", "linear", 1000000.0)
    assert (sliding.layer_type, sliding.rope_type, sliding.base) == ("sliding_attention", "default", 10000.0)
    assert full.inv_freq[0] == 1 / 8


def test_a_table_of_sines_is_read_back():
    config = GPTJConfig(n_embd=64, n_head=2, n_layer=1, rotary_dim=16, vocab_size=16, n_positions=32)
    (rope,) = gather_rope(on_meta(config), 32)
    assert (rope.base, rope.dim, rope.training_length) == (10000.0, 16, 32)
    assert rope.inv_freq == pytest.approx([10000 ** (-2 * pair / 16) for pair in range(8)], rel=1e-5)


def test_a_plain_module_has_none():
    assert gather_rope(nn.Sequential(nn.Linear(2, 2)), 8) == ()


def test_the_default_device_of_the_caller_does_not_matter():
    model = on_meta(llama(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024))
    with torch.device("meta"):
        assert gather_rope(model, 4096) == gather_rope(model, 4096)


def test_what_if_scalings_of_an_unscaled_model():
    model = on_meta(llama(rope_type="default"))
    linear, ntk, yarn, llama3 = gather_scaled_rope(model, 16384, ("linear:4", "ntk:4", "yarn:4", "llama3:8"))
    assert [one.rope_type for one in (linear, ntk, yarn, llama3)] == ["linear:4", "ntk:4", "yarn:4", "llama3:8"]
    assert linear.inv_freq == pytest.approx([one / 4 for one in linear.unscaled_inv_freq])
    base = 10000 * (4 * 16384 / 4096 - 3) ** (128 / 126)
    assert ntk.inv_freq[63] == pytest.approx(base ** (-126 / 128), rel=1e-5)
    # YaRN leaves the fast pairs, divides the slow ones by 4 and sharpens attention by 0.1 ln 4 + 1
    assert yarn.inv_freq[0] == yarn.unscaled_inv_freq[0]
    assert yarn.inv_freq[63] == pytest.approx(yarn.unscaled_inv_freq[63] / 4)
    assert yarn.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    # Llama 3: pairs slower than the training length (low_freq_factor 1) are divided, those 4 times faster are left
    for scaled, plain in zip(llama3.inv_freq, llama3.unscaled_inv_freq, strict=True):
        wavelength = 2 * math.pi / plain
        if wavelength > 4096:
            assert scaled == pytest.approx(plain / 8)
        elif wavelength < 4096 / 4:
            assert scaled == plain


def test_what_if_starts_from_the_length_before_the_shipped_scaling():
    shipped = llama(rope_type="yarn", factor=8.0, original_max_position_embeddings=1024, max_position_embeddings=8192)
    plain = llama(rope_type="default", max_position_embeddings=1024)
    assert (
        gather_scaled_rope(on_meta(shipped), 8192, ("ntk:2",))[0].inv_freq
        == gather_scaled_rope(on_meta(plain), 8192, ("ntk:2",))[0].inv_freq
    )
