from __future__ import annotations

from support.tiny import build, record

from introspect.hooks.layer_kinds import layer_kinds


def kinds_of(model, stack="model.layers"):
    """A small number for each layer's kind, in order of appearance."""
    numbers = {}
    kinds = layer_kinds(model, record(model))[stack]
    return [numbers.setdefault(kind, len(numbers)) for kind in kinds]


def test_equal_layers_are_one_kind_apart_from_the_first_which_reads_the_embedding():
    assert kinds_of(build("Llama", num_hidden_layers=4)) == [0, 1, 1, 1]


def test_sliding_and_full_layers_have_the_same_ops_and_differ_by_the_mask_they_read():
    types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    model = build("Gemma2", num_hidden_layers=5, layer_types=types, head_dim=16)

    assert kinds_of(model) == [0, 1, 2, 1, 2]


def test_dense_and_expert_layers_differ_by_what_they_ran():
    model = build("Qwen2Moe", num_hidden_layers=5, decoder_sparse_step=2, num_experts=4, moe_intermediate_size=16)

    assert kinds_of(model) == [0, 1, 2, 1, 2]


def test_the_group_of_query_heads_is_part_of_a_kind_and_its_size_is_not():
    grouped, wide, alone = (
        set(layer_kinds(model, record(model))["model.layers"])
        for model in (
            build("Llama"),
            build("Llama", hidden_size=128, num_attention_heads=8, num_key_value_heads=4),
            build("Llama", num_key_value_heads=4),
        )
    )

    assert grouped == wide
    assert not grouped & alone


def test_a_stack_that_did_not_run_is_known_by_its_parameters():
    model = build("Llama", num_hidden_layers=3)
    trace = record(build("Llama", num_hidden_layers=3))
    model.extra = build("Llama", num_hidden_layers=2).model.layers

    assert len(set(layer_kinds(model, trace)["extra"])) == 1
