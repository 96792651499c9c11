"""`params` on records made by hand, then on small real models whose parameter names must not matter."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.tiny import build, record
from support.traces import (
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    VOCABULARY,
    WIDTH,
    Recording,
    gated_ffn,
    latent_model,
    llama,
    llama_layer,
    moe_ffn,
)

from introspect.analyzers.params import Params, analyze
from introspect.records import Parameter

ATTENTION = HIDDEN * WIDTH * (2 * HEADS + 2 * KV_HEADS)
FFN = 3 * HIDDEN * INNER


def ask(trace, **options):
    return analyze(Params(**options), lambda run: trace)


def test_llama():
    totals = ask(llama()).totals
    assert totals == {
        "total": 2 * (ATTENTION + FFN + 2 * HIDDEN) + HIDDEN + 2 * HIDDEN * VOCABULARY,
        "active": 2 * (ATTENTION + FFN + 2 * HIDDEN) + HIDDEN + 2 * HIDDEN * VOCABULARY,
        "embedding": HIDDEN * VOCABULARY,
        "lm_head": HIDDEN * VOCABULARY,
        "attention": 2 * ATTENTION,
        "ffn": 2 * FFN,
        "norm": 5 * HIDDEN,
        "router": 0,
        "other": 0,
        "bias": 0,
        "layers": 2 * (ATTENTION + FFN + 2 * HIDDEN),
        "buffers": 0,
        "routed_experts": 0,
        "shared_experts": 0,
        "unused": 0,
        "weight_bytes": 2 * (2 * (ATTENTION + FFN + 2 * HIDDEN) + HIDDEN + 2 * HIDDEN * VOCABULARY),
    }


def test_a_norm_behind_a_shared_expert_is_none_of_it():
    def ffn(r, x):
        routed = moe_ffn("layers.0.moe", experts=8, top_k=2, inner=27)(r, x)
        shared = r.norm(gated_ffn(r, x, "layers.0.shared", 49), "layers.0.shared_norm")
        return r.op("add", (routed, shared), r.tensors[x].shape, module="layers.0")

    totals = ask(llama(layers=1, ffn=lambda layer: ffn)).totals
    assert totals["shared_experts"] == 3 * HIDDEN * 49
    assert totals["routed_experts"] + totals["shared_experts"] == totals["ffn"]
    assert totals["norm"] == 4 * HIDDEN


def test_a_mixture():
    trace = llama(layers=1, ffn=lambda layer: moe_ffn("layers.0.moe", experts=8, top_k=2, inner=27, shared=49))
    totals = ask(trace).totals
    routed = 8 * 3 * HIDDEN * 27
    assert totals["routed_experts"] == routed
    assert totals["shared_experts"] == 3 * HIDDEN * 49
    assert totals["router"] == 8 * HIDDEN
    assert totals["ffn"] == routed + 3 * HIDDEN * 49
    assert totals["total"] - totals["active"] == routed * 6 // 8  # two of eight experts


def test_active_is_unknown_where_top_k_is():
    trace = llama(layers=1, ffn=lambda layer: moe_ffn("layers.0.moe"))
    ops = tuple(replace(op, experts=replace(op.experts, top_k=0)) if op.experts else op for op in trace.ops)
    assert ask(replace(trace, ops=ops)).totals["active"] is None


def test_choices_that_compute_nothing_are_not_active():
    # 6 tokens x 2 choices, of which only 4 rows reach the 8 experts (LongCat's identity experts take the rest)
    trace = llama(layers=1, ffn=lambda layer: moe_ffn("layers.0.moe", inner=27))
    some = (1, 1, 1, 1, 0, 0, 0, 0)
    ops = tuple(replace(op, experts=replace(op.experts, rows=some)) if op.experts else op for op in trace.ops)
    totals = ask(replace(trace, ops=ops)).totals
    assert totals["total"] - totals["active"] == 8 * 3 * HIDDEN * 27 * (48 - 4) // 48


def test_latent_norms_are_norms():
    totals = ask(latent_model()).totals
    assert totals["norm"] == 27 + HIDDEN
    assert totals["attention"] == HIDDEN * 4 * 16 + HIDDEN * 32 + 27 * 4 * 18 + 4 * 7 * HIDDEN  # q, kv_a, kv_b, o


def test_a_tied_head_counts_under_embedding():
    r = Recording()
    x = r.lookup("embed.weight", VOCABULARY, HIDDEN, 6)
    r.tie("head.weight", "embed.weight")
    r.linear(r.norm(x, "norm"), "head", VOCABULARY)
    totals = ask(r.trace()).totals
    assert (totals["embedding"], totals["lm_head"]) == (HIDDEN * VOCABULARY, 0)
    assert totals["total"] == HIDDEN * VOCABULARY + HIDDEN


def test_a_bias_goes_with_its_matrix():
    r = Recording()
    x = r.lookup("embed.weight", VOCABULARY, HIDDEN, 6)
    q, k, v = (r.linear(x, f"layers.0.{name}", HIDDEN, bias=True) for name in "abc")
    mixed = r.attention(q, k, v, heads=4, kv_heads=4, width=8, module="layers.0")
    r.op("add", (x, r.linear(mixed, "layers.0.d", HIDDEN)), r.tensors[x].shape, module="layers.0")
    totals = ask(r.trace()).totals
    assert totals["bias"] == 3 * HIDDEN
    assert totals["attention"] == 4 * HIDDEN * HIDDEN + 3 * HIDDEN


def test_what_is_never_read_is_listed_and_not_active():
    trace = llama()
    tower = [Parameter(path=f"tower.{n}.w", shape=(7, 11), dtype="bf16", touched=False) for n in "ab"]
    lone = Parameter(path="norm.lone", shape=(3,), dtype="bf16", touched=False)
    result = ask(replace(trace, parameters=(*trace.parameters, *tower, lone)))
    assert result.totals["unused"] == result.totals["other"] == 2 * 77 + 3
    assert result.totals["total"] - result.totals["active"] == 2 * 77 + 3
    assert "never read by the forward: tower (154), norm.lone (3)" in result.notes
    unread = [row["parameter"] for row in result.tables["parameters"].rows if not row["used"]]
    assert unread == ["tower.a.w", "tower.b.w", "norm.lone"]


def test_an_unread_parameter_is_placed_like_its_twin_in_another_layer():
    trace = llama(layers=1)
    twin = Parameter(path="layers.1.ffn.up.weight", shape=(INNER, HIDDEN), dtype="bf16", touched=False)
    modules = {**trace.modules, "layers.1": "Module", "layers.1.ffn": "Module"}
    totals = ask(replace(trace, parameters=(*trace.parameters, twin), modules=modules)).totals
    assert totals["ffn"] == FFN + HIDDEN * INNER
    assert totals["unused"] == HIDDEN * INNER


def test_rows_fold_equal_layers_and_shares_sum_to_one():
    ffn = {0: None, 1: moe_ffn("layers.1.moe"), 2: moe_ffn("layers.2.moe")}
    rows = ask(llama(layers=3, ffn=ffn.get)).tables["parameters"].rows
    by_name = {(row["parameter"], row["layers"]): row for row in rows}
    assert by_name["layers.*.ffn.up.weight", "0"]["count"] == 1
    assert by_name["layers.*.moe.gate.weight", "1-2"]["count"] == 2
    assert by_name["layers.*.attn.q.weight", "1-2"]["params"] == 2 * HIDDEN * HEADS * WIDTH
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    for layers in ("0", "1-2"):
        assert sum(row["layer_share"] for row in rows if row["layers"] == layers) == pytest.approx(1)
    assert by_name["norm.weight", ""]["layer_share"] is None


def test_what_makes_the_stream_before_the_first_layer_is_embedding():
    r = Recording()
    patches = r.linear(r.tensor((1, 6, 147)), "patch", HIDDEN)
    placed = r.op("add", (patches, r.parameter("positions", (1, 6, HIDDEN))), (1, 6, HIDDEN))
    x = llama_layer(r, placed, 0)
    r.linear(r.op("mean", (x,), (1, HIDDEN), kind="reduction"), "pooler", HIDDEN)
    totals = ask(r.trace()).totals
    assert totals["embedding"] == 147 * HIDDEN + 6 * HIDDEN
    assert totals["other"] == HIDDEN * HIDDEN


def test_a_table_of_distances_belongs_to_attention():
    # T5: rows of one number a head, looked up by distance and added to the scores
    r = Recording()
    x = r.lookup("embed.weight", VOCABULARY, HIDDEN, 6)
    distances = r.op("arange", (), (6, 6), kind="factory", dtype="int64")
    table = r.parameter("layers.0.distances.weight", (32, 4))
    bias = r.op("embedding", (table, distances), (6, 6, 4), kind="lookup", module="layers.0")
    bias = r.op("add", (bias, r.op("le", (distances,), (6, 6, 4))), (6, 6, 4), module="layers.0")
    q, k, v = (r.linear(x, f"layers.0.{name}", HIDDEN) for name in "qkv")
    mixed = r.attention(q, k, v, heads=4, kv_heads=4, width=8, module="layers.0", bias=bias)
    r.op("add", (x, r.linear(mixed, "layers.0.o", HIDDEN)), r.tensors[x].shape, module="layers.0")
    totals = ask(r.trace()).totals
    assert totals["embedding"] == VOCABULARY * HIDDEN
    assert totals["attention"] == 4 * HIDDEN * HIDDEN + 32 * 4


def test_a_scale_of_the_stream_belongs_to_what_alone_reads_it():
    # RWKV mixes each token with the one before by learned weights, one set for each projection
    r = Recording()
    x = r.lookup("embed.weight", VOCABULARY, HIDDEN, 6)
    shifted = r.op("mul", (x, r.parameter("layers.0.mix", (HIDDEN,))), (1, 6, HIDDEN), module="layers.0")
    mixed = r.attention(
        *(r.linear(shifted, f"layers.0.{name}", HIDDEN) for name in "qkv"),
        heads=4,
        kv_heads=4,
        width=8,
        module="layers.0",
    )
    scaled = r.op("mul", (x, r.parameter("layers.0.residual", (HIDDEN,))), (1, 6, HIDDEN), module="layers.0")
    r.op("add", (scaled, r.linear(mixed, "layers.0.o", HIDDEN)), (1, 6, HIDDEN), module="layers.0")
    totals = ask(r.trace()).totals
    assert totals["attention"] == 4 * HIDDEN * HIDDEN + HIDDEN
    assert totals["other"] == HIDDEN


SMALL = {"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 48}
SMALL |= {"num_experts_per_tok": 2}
MODELS = {
    "Llama": {},
    "Gemma2": {"head_dim": 16},
    "Gemma3": {"head_dim": 16},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Phi3": {"pad_token_id": 0},
    "Cohere": {},
    "Olmo2": {},
    "GPTNeoX": {},
    "Bloom": {},
    "Falcon": {},
    "OPT": {"ffn_dim": 160, "word_embed_proj_dim": 64},
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "GPTBigCode": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "GPTJ": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "Mixtral": SMALL,
    "Qwen2Moe": SMALL | {"shared_expert_intermediate_size": 40},
    "Qwen3Moe": SMALL,
    "GptOss": SMALL | {"head_dim": 16},
    "DeepseekV3": SMALL
    | {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
    | {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
    "Jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4},
    "Mamba": {},
    "Qwen3Next": SMALL
    | {"num_hidden_layers": 4, "shared_expert_intermediate_size": 40, "head_dim": 16}
    | {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "Lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
}
NAMES = (  # what each part is called in these models, for the check only
    ("norm", r"norm|\bln_|layernorm"),
    ("router", r"\b(mlp|block_sparse_moe|feed_forward)\.(gate|router)\."),
    ("attention", r"attn|attention|mamba|mixer|linear_attn|\bconv\."),
    ("ffn", r"mlp|ffn|feed_forward|experts|\bfc\d|dense_h|dense_4h"),
    ("embedding", r"embed|\bwte\b|\bwpe\b"),
    ("lm_head", r"lm_head|embed_out"),
)


@pytest.mark.parametrize("name", MODELS)
def test_parts_of_real_models_are_those_their_names_say(name):
    rows = ask(record(build(name, **MODELS[name]), seq=16)).tables["parameters"].rows
    said = {row["parameter"]: next(part for part, names in NAMES if re.search(names, row["parameter"])) for row in rows}
    assert {row["parameter"]: row["component"] for row in rows} == said
