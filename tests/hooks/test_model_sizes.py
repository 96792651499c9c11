from __future__ import annotations

from support.tiny import build
from torch import nn

from introspect.hooks.model_sizes import _shape, sizes_of


def test_matrices_and_calls_are_sized():
    sizes = sizes_of(build("Llama"))

    assert sizes["model.embed_tokens", "rows"] == 512
    assert sizes["model.layers.0.mlp.down_proj", "k"] == 160
    assert sizes["model.layers.1.self_attn", "kv_heads"] == 2


def test_only_what_an_experts_call_ran_over_is_experts():
    sizes = sizes_of(build("Mixtral", num_local_experts=4, num_experts_per_tok=2))

    assert sizes["model.layers.0.mlp.experts.gate_up_proj", "experts"] == 4
    assert sizes["model.layers.0.mlp.experts", "top_k"] == 2
    assert _shape(nn.Module(), (2, 10, 6), None) == {"k": 6, "n": 10, "stack": 2}  # a table of two dimensions


def test_a_convolutions_filter_has_channels_and_a_kernel():
    sizes = sizes_of(build("Mamba", state_size=8, conv_kernel=4))

    channels = {place: size for place, size in sizes.items() if place[0] == "backbone.layers.0.mixer.conv1d"}
    assert channels == {
        ("backbone.layers.0.mixer.conv1d", "k"): 1,
        ("backbone.layers.0.mixer.conv1d", "n"): 160,
        ("backbone.layers.0.mixer.conv1d", "kernel"): 4,
    }
    assert not any(dimension == "experts" for _, dimension in sizes)


def test_a_transposed_matrix_is_read_the_right_way():
    sizes = sizes_of(build("GPT2", n_embd=64, n_layer=2, n_head=4, n_inner=96))

    assert (sizes["transformer.h.0.mlp.c_fc", "k"], sizes["transformer.h.0.mlp.c_fc", "n"]) == (64, 96)
