"""The cache: against a real CPU run of each kind of model, published figures, and what an engine may choose."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tiny import build
from support.traces import HEADS, KV_HEADS, LATENT, WIDTH, latent_model, llama

import introspect
from introspect.analyzers._cache import Part
from introspect.analyzers._kv_memory import KV_FORMATS, KvMemory, per_rank, with_format
from introspect.errors import OptionError, ShardingError, TraceShapeError

CONTEXT = 24
SHARED = ["sliding_attention", "full_attention"]
TWINS = {
    "full": ("Llama", {}),
    "sliding": ("Mistral", {"sliding_window": 8}),
    "sliding and full": ("Gemma2", {"sliding_window": 8, "head_dim": 16, "layer_types": SHARED}),
    "latent": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "hybrid": (
        "FalconH1",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "head_dim": 16},
    ),
    "state": ("Mamba", {}),
    "shared": (
        "Gemma3n",
        {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": SHARED * 2,
            "sliding_window": 8,
            "head_dim": 16,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 512,
            "intermediate_size": [32] * 4,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.0] * 4,
            "pad_token_id": 0,
        },
    ),
}


def real_cache_bytes(model):
    """Bytes of every tensor that the cache object holds after the model really ran CONTEXT tokens (counters apart)."""
    ids = torch.arange(CONTEXT)[None] % 100 + 1
    with torch.no_grad():
        output = model(input_ids=ids, use_cache=True)
    cache = output.get("past_key_values", output.get("cache_params"))
    return sum(tensor.nbytes for layer in cache.layers for tensor in tensors_of(vars(layer)) if tensor.dim())


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)


@pytest.mark.parametrize("kind", TWINS)
def test_kv_is_what_the_real_cache_holds(kind):
    name, sizes = TWINS[kind]
    result = introspect.analyze("kv", build(name, **sizes), context=CONTEXT, no_cache=True)
    assert result.totals["bytes_at_context"] == real_cache_bytes(build(name, device="cpu", **sizes))
    layers = result.tables["layers"].rows
    assert sum(row["bytes_at_context"] for row in layers) == result.totals["bytes_at_context"]
    assert sum(row["bytes_per_token"] for row in layers) == result.totals["bytes_per_token"]


@pytest.mark.parametrize(
    ("kind", "kinds"),
    [
        ("full", ["GQA"]),
        ("sliding", ["sliding"]),
        ("sliding and full", ["sliding", "GQA"]),
        ("latent", ["MLA"]),
        ("hybrid", ["GQA", "linear"]),
        ("state", ["state"]),
        ("shared", ["sliding", "GQA", "shared", "shared"]),
    ],
)
def test_kinds_are_named_from_shapes(kind, kinds):
    name, sizes = TWINS[kind]
    rows = introspect.analyze("kv", build(name, **sizes), context=CONTEXT, no_cache=True).tables["layers"].rows
    assert [row["kind"] for row in rows] == kinds


def test_a_full_layer_by_hand():
    result = introspect.analyze("kv", llama(phase="decode", seq=1, context=10))
    # 2 layers x 2 heads x (8 + 8) x 2 bytes
    assert result.totals["bytes_per_token"] == 2 * KV_HEADS * 2 * WIDTH * 2 == 128
    assert result.totals["bytes_at_context"] == 10 * 128
    assert result.totals["bytes_per_token_as_mha"] == 2 * HEADS * 2 * WIDTH * 2
    assert result.totals["bytes_per_token_as_mqa"] == 2 * 2 * WIDTH * 2
    assert result.totals["reserved_bytes_at_context"] == 16 * 128  # one page of 16
    (row,) = result.tables["layers"].rows
    assert (row["layers"], row["group"], row["decode_flop_per_byte"]) == ("0-1", 2, 2)


def test_latent_attention_three_ways_by_hand():
    result = introspect.analyze("kv", latent_model(phase="decode", seq=1, context=100))
    rank, nope, rope, value = LATENT.values()
    rows = {(row["phase"], row["method"]): row for row in result.tables["latent"].rows}
    expansion, keys = 2 * rank * HEADS * (nope + value), 101
    whole = 2 * keys * HEADS * (nope + rope + value)
    assert rows["decode", "absorbed"]["flops_per_token"] == expansion + 2 * keys * HEADS * (2 * rank + rope)
    assert rows["decode", "expanded"]["flops_per_token"] == expansion + whole
    assert rows["decode", "re-expanded"]["flops_per_token"] == keys * expansion + whole
    assert rows["decode", "absorbed"]["kv_bytes_per_token"] == 2 * (rank + rope)
    assert rows["decode", "expanded"]["kv_bytes_per_token"] == 2 * HEADS * (nope + rope + value)
    assert rows["prefill", "expanded"]["flops_per_token"] == rows["prefill", "re-expanded"]["flops_per_token"]
    # a prompt of 100 has 5050 pairs
    assert rows["prefill", "absorbed"]["flops_per_token"] == expansion + 2 * 50.5 * HEADS * (2 * rank + rope)


def test_absorption_loses_where_both_cost_the_same():
    """q L H (2r + rope) = L r n + q L H (dk + dv) for a long context: at q = r n / (H (2r - nope - dv))."""
    context = 10**6
    totals = introspect.analyze("kv", latent_model(phase="decode", seq=1, context=context)).totals
    rank, nope, _, value = LATENT.values()
    assert totals["absorption_loses_from_query_length"] == int(rank * (nope + value) / (2 * rank - nope - value)) + 1


def test_capacity_of_llama_3_8b():
    rows = (
        introspect.analyze("kv", "meta-llama/Meta-Llama-3-8B", context=(8192, 32768), gpu="h100-sxm", offline=True)
        .tables["capacity"]
        .rows
    )
    assert [row["max_tokens"] for row in rows] == [487819, 487819]  # (80e9 - 16,060,522,496) / 131,072
    assert [row["max_sequences"] for row in rows] == [59, 14]
    assert rows[0]["max_context"] == 487819  # one sequence


@pytest.mark.parametrize(
    ("kv_dtype", "per_token"),
    [
        ("fp8", 2 * KV_HEADS * 2 * WIDTH),
        ("fp32", 2 * KV_HEADS * 2 * WIDTH * 4),
        ("int8", 2 * KV_HEADS * 2 * (WIDTH + 2)),  # an fp16 scale for each vector of 8
        ("int4", 2 * KV_HEADS * 2 * (WIDTH // 2 + 4)),  # and a zero point
        ("fp4", 2 * KV_HEADS * 2 * (WIDTH // 2) + 2 * KV_HEADS * 2 * WIDTH // 16),  # a byte for 16 elements
    ],
)
def test_other_types_carry_their_scales(kv_dtype, per_token):
    result = introspect.analyze("kv", llama(phase="decode", seq=1, context=10), kv_dtype=kv_dtype)
    assert result.totals["bytes_per_token"] == per_token
    assert any(kv_dtype in line for line in result.assumptions)


def test_states_keep_their_own_type():
    name, sizes = TWINS["hybrid"]
    model = build(name, **sizes)
    whole = introspect.analyze("kv", model, context=CONTEXT, no_cache=True).totals
    small = introspect.analyze("kv", model, context=CONTEXT, kv_dtype="fp8", no_cache=True).totals
    assert small["state_bytes"] == whole["state_bytes"] > 0
    assert 4 * small["bytes_per_token"] == whole["bytes_per_token"]


FULL = Part(kind="GQA", layer=(0,), dtype="bf16", row_bits=512, row_elements=32, query_heads=4, kv_heads=2)
SLIDING = Part(
    kind="sliding", layer=(1,), dtype="bf16", row_bits=512, row_elements=32, window=64, query_heads=4, kv_heads=2
)
STATE = Part(kind="state", layer=(2,), dtype="fp32", state_bytes=1000)
LATENT_PART = Part(kind="MLA", layer=(3,), dtype="bf16", row_bits=320, row_elements=20, query_heads=4, kv_heads=1)
EVERY = (FULL, SLIDING, STATE, LATENT_PART)


def test_a_window_keeps_one_row_less_than_it_shows():
    assert [SLIDING.bytes_at(context) for context in (10, 63, 64, 10**6)] == [640, 4032, 4032, 4032]


def test_reserved_pages_ignore_windows():
    memory = KvMemory(parts=(FULL, SLIDING, STATE), page_size=16)
    assert memory.reserved_bytes_at(100) == 2 * 112 * 64 + 1000
    assert memory.bytes_at(100) == 100 * 64 + 63 * 64 + 1000


def test_a_shared_prefix_is_held_once():
    memory = KvMemory(parts=(FULL,), shared_prefix=40)
    assert memory.total_bytes(100, 5) == (40 + 5 * 60) * 64


@given(st.integers(1, 10**5), st.integers(0, 10**5), st.integers(1, 1000))
def test_sharing_never_costs_more_and_one_sequence_shares_with_nobody(context, prefix, sequences):
    shared, own = KvMemory(parts=EVERY, shared_prefix=prefix), KvMemory(parts=EVERY)
    assert own.total_bytes(context, sequences) == sequences * own.bytes_at(context)
    if sequences > 1:
        assert shared.total_bytes(context, sequences) <= own.total_bytes(context, sequences) + 64 * prefix
    assert shared.total_bytes(context, 1) >= own.bytes_at(context)


@given(st.integers(0, 10**6), st.integers(1, 10**5))
def test_more_tokens_never_take_less(context, more):
    memory = KvMemory(parts=EVERY, page_size=16)
    assert memory.bytes_at(context) <= memory.bytes_at(context + more)
    assert memory.bytes_at(context) <= memory.reserved_bytes_at(context)


@given(st.sampled_from([1, 2, 4, 8, 16]))
def test_ranks_together_hold_at_least_the_whole(tp):
    ranks = per_rank(EVERY, tp)
    for whole, part in zip(EVERY, ranks, strict=True):
        assert part.row_bits * tp >= whole.row_bits
        assert part.state_bytes == whole.state_bytes
    assert ranks[0].kv_heads == max(1, 2 // tp)
    assert ranks[3].row_bits == LATENT_PART.row_bits  # a latent belongs to all heads


@given(st.sampled_from(sorted(KV_FORMATS)))
def test_a_format_changes_only_what_is_cached_per_token(name):
    for before, after in zip(EVERY, with_format(EVERY, name), strict=True):
        assert after.state_bytes == before.state_bytes
        assert after.rows(100) == before.rows(100)


def test_one_of_two_ranks_holds_half_of_the_heads():
    model = build("Llama", dtype=torch.bfloat16)
    whole, rank = (
        introspect.analyze("kv", model, context=CONTEXT, tp=tp, no_cache=True).tables["capacity"].rows[0]
        for tp in (1, 2)
    )
    assert 2 * rank["kv_bytes"] == whole["kv_bytes"]
    norms = 5 * 64 * 2  # held whole by each
    assert rank["weight_bytes"] == (whole["weight_bytes"] - norms) // 2 + norms
    assert rank["free_bytes"] == 80 * 10**9 - rank["weight_bytes"]


def test_more_ranks_than_heads_hold_one_each():
    model = build("Llama", dtype=torch.bfloat16, num_key_value_heads=2)
    two, four = (
        introspect.analyze("kv", model, context=CONTEXT, tp=tp, no_cache=True).tables["capacity"].rows[0]
        for tp in (2, 4)
    )
    assert four["kv_bytes"] == two["kv_bytes"]


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ShardingError, match=r"cannot shard \(tp 3\).*expected --tp 2 or 4"):
        introspect.analyze("kv", build("Llama"), context=CONTEXT, tp=3, no_cache=True)


def test_a_stored_record_answers_for_its_own_context(tmp_path):
    path = tmp_path / "trace.json"
    introspect.save_trace(llama(phase="decode", seq=1, context=10), path)
    assert introspect.analyze("kv", str(path)).totals["bytes_at_context"] == 1280


def test_a_stored_record_of_another_phase_is_refused():
    with pytest.raises(
        TraceShapeError, match=r"holds one run \(phase prefill.*cannot answer for another \(phase decode"
    ):
        introspect.analyze("kv", llama(seq=6))


def test_an_empty_cache_holds_nothing_and_grows():
    result = introspect.analyze("kv", build("Llama"), context=0, no_cache=True)
    assert result.totals["bytes_at_context"] == 0
    assert result.totals["bytes_per_token"] == 2 * 2 * 2 * 16 * 4  # 2 layers, 2 heads, keys and values of 16 in fp32
    assert result.tables["capacity"].rows[0]["max_sequences"] is None


def test_an_unknown_type_is_refused():
    with pytest.raises(OptionError, match="kv_dtype: got 'fp7', expected fp32, bf16"):
        introspect.analyze("kv", llama(phase="decode", seq=1, context=10), kv_dtype="fp7")
