"""Each rule moves what it says, and nothing where it is true."""

from __future__ import annotations

from dataclasses import replace

import pytest

from introspect.analyzers._cache import Part
from introspect.analyzers._hand_facts import FfnChain, HeadMatrix
from introspect.analyzers._hand_formulas import CacheFacts, Measured, hand_formulas, read_sizes

CONFIG = {"hidden_size": 64, "num_attention_heads": 4}
QUERY = HeadMatrix(role="query", across=64, heads=4, width=32, rotary=0, query_heads=4, key_heads=2)
KEY = replace(QUERY, role="key", heads=2)
DENSE = FfnChain(layer="0", model=64, width=160, inner=320, up_params=64 * 320, down_params=160 * 64, dense=True)
FULL = Part(
    kind="GQA",
    layer=(0,),
    dtype="bf16",
    row_bits=2 * 2 * 32 * 16,
    row_elements=2 * 2 * 32,
    query_heads=4,
    kv_heads=2,
    k_dim=32,
    v_dim=32,
)
LATENT = Part(
    kind="MLA",
    layer=(0,),
    dtype="bf16",
    row_bits=(24 + 8) * 16,
    row_elements=24 + 8,
    query_heads=4,
    kv_heads=1,
    k_dim=24,
    v_dim=16,
)
STATE = Part(kind="state", layer=(1,), dtype="fp32", state_bytes=4096)


def measured(parts=(FULL,), layers=1, context=None, **facts):
    usual = {"total": 10**6, "active": 10**6, "head": 1000, "head_in_table": 0, "heads": (QUERY, KEY), "ffn": (DENSE,)}
    cache = CacheFacts(parts=parts, layers=layers, context=context)
    return Measured(**{**usual, "flops_per_token": 10**6, "flops_all_experts": 10**6, **facts}, cache=cache)


def difference(rule, quantity, facts):
    (row,) = (r for r in hand_formulas(CONFIG, facts).rows if (r["rule"], r["quantity"]) == (rule, quantity))
    return row["difference"]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("mha", 64 * (4 - 2) * 32),
        ("q_by_kv_heads", -64 * (4 - 2) * 32),
        ("head_dim", -64 * (4 + 2) * (32 - 16)),  # d/H = 16
        ("tied", -1000),
        ("untied", 0),
        ("ffn_4d", 3 * 64 * (256 - 160)),
        ("two_matrix_ffn", -64 * 160),
    ],
)
def test_parameters(rule, expected):
    assert difference(rule, "parameters", measured()) == expected


def test_rules_that_are_true_make_no_difference():
    heads = (replace(QUERY, width=16, key_heads=4), replace(KEY, heads=4, width=16, key_heads=4))
    chain = replace(DENSE, width=256, inner=256, up_params=64 * 256, down_params=256 * 64)
    part = replace(FULL, row_bits=2 * 4 * 16 * 16, row_elements=2 * 4 * 16, kv_heads=4, k_dim=16, v_dim=16)
    facts = measured(parts=(part,), heads=heads, ffn=(chain,), head=0, flops_per_token=2 * 10**6)
    facts = replace(facts, flops_all_experts=facts.flops_per_token)

    assert {row["difference"] for row in hand_formulas(CONFIG, facts).rows} == {0}
    assert {row["relative_error"] for row in hand_formulas(CONFIG, facts).rows} == {0.0}


def test_experts_keep_their_width_and_lose_their_gate():
    experts = replace(DENSE, dense=False, up_params=8 * 64 * 320, down_params=8 * 160 * 64)

    assert difference("ffn_4d", "parameters", measured(ffn=(experts,))) == 0
    assert difference("two_matrix_ffn", "parameters", measured(ffn=(experts,))) == -8 * 64 * 160


def test_the_widest_chain_of_a_layer_is_its_ffn():
    narrow = replace(DENSE, width=8, inner=8, up_params=64 * 8, down_params=8 * 64)

    assert difference("ffn_4d", "parameters", measured(ffn=(narrow, DENSE))) == 3 * 64 * (256 - 160)


def test_a_head_in_the_table():
    facts = measured(head=0, head_in_table=5000)

    assert difference("untied", "parameters", facts) == 5000
    assert difference("tied", "parameters", facts) == 0


@pytest.mark.parametrize(
    ("rule", "parts", "expected"),
    [
        ("mha", (FULL,), 2 * (4 - 2) * 32 * 2),
        ("head_dim", (FULL,), -2 * 2 * (32 - 16) * 2),
        ("kv_expanded", (FULL,), 0),
        ("kv_expanded", (LATENT,), (4 * (24 + 16) - 32) * 2),
        ("mha", (LATENT,), 0),  # the expanded heads are as many as the queries'
        ("head_dim", (LATENT,), 0),  # a latent has no heads
        ("all_layers_full", (LATENT,), 0),
    ],
)
def test_cache(rule, parts, expected):
    assert difference(rule, "kv_bytes_per_token", measured(parts=parts)) == expected


def test_layers_without_attention_would_cache_what_one_with_it_does():
    # one attention layer, one state, one layer that keeps nothing
    assert difference("all_layers_full", "kv_bytes_per_token", measured((FULL, STATE), layers=3)) == 2 * 256


def test_a_shared_cache_is_no_missing_layer():
    shared = replace(FULL, kind="shared", layer=(1,), row_bits=0, row_elements=0)

    assert difference("all_layers_full", "kv_bytes_per_token", measured((FULL, shared), layers=2)) == 0


def test_windows_at_each_context():
    parts = (FULL, replace(FULL, kind="sliding", layer=(1,), window=8))

    def row(rule, context):
        (found,) = (
            r
            for r in hand_formulas(CONFIG, measured(parts, layers=2, context=context)).rows
            if (r["rule"], r["quantity"]) == (rule, "kv_bytes_per_token")
        )
        return found["context"], found["record"], found["hand"]

    assert row("all_layers_full", None) == (8, 256, 512)
    assert row("all_layers_full", 0) == (0, 512, 512)
    assert row("all_layers_full", 100) == (100, 256, 512)
    assert row("mha", None) == (0, 512, 1024)
    assert row("mha", 100) == (100, 256, 512)


def test_what_is_unknown_is_null():
    facts = measured(active=None, parts=())
    rows = {(r["rule"], r["quantity"]): r for r in hand_formulas(CONFIG, facts).rows}

    assert rows["2n_per_token", "flops_per_token"]["hand"] is None
    assert rows["2n_per_token", "flops_per_token"]["relative_error"] is None
    assert not any(quantity == "kv_bytes_per_token" for _, quantity in rows)  # no cache, no rows about one


def test_an_error_without_bound_is_null():
    window = replace(FULL, kind="sliding", window=8)
    rows = hand_formulas(CONFIG, measured((window,), context=100)).rows
    errors = {row["rule"]: row["relative_error"] for row in rows if row["quantity"] == "kv_bytes_per_token"}

    assert errors == {"mha": 0.0, "head_dim": 0.0, "kv_expanded": 0.0, "all_layers_full": None}


def test_the_config_under_its_usual_names():
    sizes = read_sizes({"n_embd": 768, "n_head": 12})
    assert sizes is not None
    assert (sizes.d, sizes.heads) == (768, 12)
    assert read_sizes({"text_config": CONFIG}) == read_sizes(CONFIG)
    assert read_sizes({"hidden_size": 64}) is None
    assert hand_formulas({}, measured()).rows == ()
