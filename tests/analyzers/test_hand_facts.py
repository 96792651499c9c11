"""The matrices that hand formulas size otherwise, read off records made by hand."""

from __future__ import annotations

import pytest
from support.tiny import build, record
from support.traces import (
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LATENT,
    VOCABULARY,
    WIDTH,
    Recording,
    latent_model,
    llama,
    moe_ffn,
)

from introspect.analyzers._hand_facts import (
    FfnChain,
    HeadMatrix,
    ffn_chains,
    head_matrices,
    head_params,
    layers_beside,
    token_flops,
)
from introspect.analyzers._step import Step
from introspect.analyzers._structure import Structure
from introspect.graph import Graph


def structure(trace):
    return Structure(Graph(trace))


def sizes(matrices):
    return [(one.role, one.across, one.heads, one.width, one.rotary) for one in matrices]


def test_separate_projections():
    found = head_matrices(structure(llama(layers=1)))

    assert sizes(found) == [
        ("query", HIDDEN, HEADS, WIDTH, 0),
        ("key", HIDDEN, KV_HEADS, WIDTH, 0),
        ("value", HIDDEN, KV_HEADS, WIDTH, 0),
        ("result", HIDDEN, HEADS, WIDTH, 0),
    ]
    assert {(one.query_heads, one.key_heads) for one in found} == {(HEADS, KV_HEADS)}


def test_a_latent_has_a_rotary_part_in_its_queries_alone():
    nope, rope, value = (LATENT[name] for name in ("nope", "rope", "value"))

    assert sizes(head_matrices(structure(latent_model()))) == [
        ("query", HIDDEN, HEADS, nope, rope),
        ("key", LATENT["rank"], HEADS, nope, 0),
        ("value", LATENT["rank"], HEADS, value, 0),
        ("result", HIDDEN, HEADS, value, 0),
    ]


@pytest.mark.parametrize(
    ("name", "fields", "groups"),
    [
        ("GPTNeoX", {}, 4),  # one product for all three
        ("Phi3", {"pad_token_id": 0}, 2),
        ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, 2),  # repeats heads before it caches them
        ("Bloom", {"n_head": 4, "n_layer": 2}, 4),  # written out in two products
        ("Qwen2", {}, 2),  # with biases, which are no matrix
        ("Gemma2", {"head_dim": 32}, 2),
        ("Qwen3Next", {"head_dim": 16, "layer_types": ["full_attention"] * 2}, 2),  # queries with a gate beside them
    ],
)
def test_heads_of_real_code(name, fields, groups):
    found = head_matrices(structure(record(build(name, **fields))))
    width = fields.get("head_dim", 16)

    assert sizes(found) == 2 * [
        ("query", 64, 4, width, 0),
        ("key", 64, groups, width, 0),
        ("value", 64, groups, width, 0),
        ("result", 64, 4, width, 0),
    ]


def test_another_size_of_heads():
    one = HeadMatrix(role="key", across=10, heads=2, width=3, rotary=1, query_heads=8, key_heads=2)

    assert one.sized() == 10 * 2 * (3 + 1)
    assert one.sized(heads=8) == 10 * 8 * (3 + 1)
    assert one.sized(width=5) == 10 * 2 * (5 + 1)


def test_chains_of_dense_routed_and_shared_products():
    mixed = llama(layers=2, ffn=lambda layer: moe_ffn(f"layers.{layer}.ffn", shared=18) if layer else None)
    dense, routed, shared = ffn_chains(structure(mixed))

    assert dense == FfnChain(
        layer="layers.0",
        model=HIDDEN,
        width=INNER,
        inner=2 * INNER,
        up_params=2 * HIDDEN * INNER,
        down_params=INNER * HIDDEN,
        dense=True,
    )
    assert (routed.width, routed.inner, routed.up_params, routed.dense) == (27, 54, 8 * HIDDEN * 54, False)  # 8 experts
    assert (shared.width, shared.inner, shared.up_params, shared.dense) == (18, 36, HIDDEN * 36, False)


def test_a_plain_chain_gives_its_own_width():
    assert {(one.width, one.inner) for one in ffn_chains(structure(record(build("GPT2"))))} == {(256, 256)}


def test_a_head_of_its_own_and_one_in_the_table():
    assert head_params(structure(llama())) == (VOCABULARY * HIDDEN, 0)
    assert head_params(structure(record(build("GPT2")))) == (0, 512 * 64)


def test_every_expert_multiplies_what_a_token_takes():
    step = Step(llama(layers=1, ffn=lambda layer: moe_ffn("layers.0.ffn")))
    flops = token_flops(step)
    expert = 2 * 3 * HIDDEN * 27

    assert flops.engine == flops.executed
    assert flops.all_experts - flops.engine == (8 - 2) * expert  # the other six of eight


def test_layers_without_attention_count():
    r = Recording()
    paths = ("layers.0", "layers.0.ffn", "layers.1", "layers.1.attn", "tower.0", "tower.0.ffn")
    r.modules |= dict.fromkeys(paths, "Module")
    q = r.lookup("embed.weight", VOCABULARY, HIDDEN, 6)
    r.attention(q, q, q, heads=4, kv_heads=4, width=8, module="layers.1.attn")

    assert layers_beside(structure(r.trace())) == 2
