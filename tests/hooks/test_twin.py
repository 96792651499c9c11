from __future__ import annotations

import pytest
from support.architectures import architecture
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from introspect.hooks import caches
from introspect.hooks.experts import Routed
from introspect.hooks.twin import run_twin

# Deep default configs start with fewer layers; the sweep takes them whole.
TYPES = {
    "llama": {}, "gemma2": {}, "mixtral": {}, "qwen3_moe": {}, "deepseek_v3": {"num_hidden_layers": 6},
    "gpt_oss": {"num_hidden_layers": 4}, "gpt2": {}, "jamba": {"num_hidden_layers": 8}, "falcon": {}, "bloom": {},
    "mamba": {"num_hidden_layers": 4},
}  # fmt: skip
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128, "head_dim": 16}


@pytest.mark.parametrize("model_type", TYPES)
def test_the_real_run_makes_the_calls_and_gives_the_logits_of_the_library(model_type):
    report = run_twin(*architecture(model_type, **TYPES[model_type]))

    assert report.differences == ()
    assert report.verified
    assert {agreement.phase for agreement in report.agreements} == {"prefill", "decode"}
    assert all(agreement.both > 0 for agreement in report.agreements)


def test_the_report_names_the_kinds_of_calls_and_the_changed_fields():
    config = MixtralConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, sliding_window=8)

    report = run_twin(MixtralForCausalLM, config)
    prefill = {agreement.kind: agreement.both for agreement in report.agreements if agreement.phase == "prefill"}

    # 2 layers: q, k, v, o, router; one attention call; experts' up and down; keys and values; and the head
    assert prefill == {
        "linear": 2 * 5 + 1, "attention": 2, "attention_qk": 2, "attention_pv": 2, "grouped": 4, "experts": 4,
        "cache": 4,
    }  # fmt: skip
    assert all(before != after for _, before, after in report.changed)


def test_a_cache_that_is_filled_wrongly_on_meta_shows(monkeypatch):
    fill = caches.fill
    monkeypatch.setattr(caches, "fill", lambda cache, tokens: fill(cache, tokens + 1))

    report = run_twin(LlamaForCausalLM, LlamaConfig(**SIZES, num_attention_heads=4))
    wrong = {(agreement.phase, agreement.kind) for agreement in report.agreements if not agreement.agrees}

    assert not report.same_calls
    assert not report.verified
    assert {("decode", "cache"), ("decode", "attention")} <= wrong
    assert any(
        line.startswith("decode of 1: only on meta: ") and "(2, 4, 13, 16)" in line for line in report.differences
    )


def test_experts_that_forget_their_weights_show_in_the_logits(monkeypatch):
    combined = Routed.combined
    monkeypatch.setattr(Routed, "combined", lambda self, x, weights: combined(self, x, 2 * weights))

    report = run_twin(MixtralForCausalLM, MixtralConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2))

    assert report.same_calls
    assert report.output_error > 1e-3
    assert not report.verified
