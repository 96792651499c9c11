from __future__ import annotations

import pytest
from support.architectures import architecture
from transformers import JambaConfig, JambaForCausalLM, LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM

from introspect.errors import ShrinkError
from introspect.hooks import shrink as shrinking
from introspect.hooks.layer_kinds import layer_kinds
from introspect.hooks.observe import observe
from introspect.hooks.shrink import IDENTITY, SMALL, TOKENS, build_on_meta, shrink
from introspect.records import RunShape


def size(model):
    return sum(parameter.numel() for parameter in model.parameters())


def look(model_class, config):
    model = build_on_meta(model_class, config)
    return model, observe(model, IDENTITY, RunShape(seq=TOKENS))


def kinds(model, trace):
    return {stack: set(kinds) for stack, kinds in layer_kinds(model, trace).items()}


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "falcon"])
def test_a_twin_is_small_and_has_all_kinds_of_layers(model_type):
    model_class, config = architecture(model_type)
    whole, trace = look(model_class, config)

    small = shrink(model_class, config)
    twin, twin_trace = look(model_class, small)

    assert size(twin) <= SMALL < size(whole)
    assert kinds(twin, twin_trace) == kinds(whole, trace)


def test_widths_shrink_together_and_heads_keep_their_group():
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256
    )

    small = shrink(LlamaForCausalLM, config)

    assert small.num_hidden_layers == 2
    assert small.intermediate_size / small.hidden_size == 14336 / 4096
    assert small.num_attention_heads / small.num_key_value_heads == 4
    assert small.num_key_value_heads > 1


def test_windows_and_position_tables_fit_the_tokens_that_are_run():
    gemma, config = architecture("gemma2")
    small = shrink(gemma, config)
    _, trace = look(gemma, small)
    assert {op.attention.window for op, _ in trace.walk() if op.attention} == {small.sliding_window, None}

    gpt2, config = architecture("gpt2")
    assert shrink(gpt2, config).n_positions > TOKENS  # a table of learned positions: the decoded token has one too


def test_experts_stay_more_than_a_token_is_sent_to():
    model_class, config = architecture("mixtral")
    _, trace = look(model_class, shrink(model_class, config))
    calls = [op.experts for op, _ in trace.walk() if op.experts]

    assert calls
    assert all(call.experts > call.top_k == 2 for call in calls)


def test_coupled_widths_move_together():
    """Mamba 2 asserts hidden_size * expand == num_heads * head_dim: none of the four can be halved alone."""
    config = Mamba2Config(hidden_size=4096, num_heads=128, head_dim=64, expand=2, num_hidden_layers=8)

    small = shrink(Mamba2ForCausalLM, config)

    assert small.hidden_size < 4096
    assert small.hidden_size * small.expand == small.num_heads * small.head_dim


def test_layers_that_come_in_a_period_are_kept_until_each_kind_was_seen():
    config = JambaConfig(attn_layer_period=4, attn_layer_offset=2, expert_layer_period=2, expert_layer_offset=1)

    # Mamba, Mamba with experts, attention, Mamba with experts, and the first Mamba layer that reads no embedding
    assert shrink(JambaForCausalLM, config).num_hidden_layers == 5


def test_a_config_that_its_class_does_not_read_back_is_refused_with_the_reason():
    class OneWay(LlamaConfig):
        @classmethod
        def from_dict(cls, fields, **options):
            raise ValueError("no way back")

    with pytest.raises(
        ShrinkError, match=r"LlamaForCausalLM: no small twin found: its config read back .*: no way back"
    ):
        shrink(LlamaForCausalLM, OneWay())


def test_a_model_that_no_field_makes_small_is_refused_with_its_size(monkeypatch):
    monkeypatch.setattr(shrinking, "SMALL", 100)

    with pytest.raises(
        ShrinkError, match=r"LlamaForCausalLM: no small twin found: the smallest found has [\d,]+ param"
    ):
        shrink(LlamaForCausalLM, LlamaConfig(hidden_size=64, intermediate_size=64, vocab_size=64, num_hidden_layers=2))
