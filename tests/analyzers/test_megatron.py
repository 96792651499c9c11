from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ranks import MODELS
from support.tiny import build, record

from introspect.analyzers._cuts import Limit, nearest_degrees
from introspect.analyzers._megatron import Degrees
from introspect.analyzers._rank import megatron_rank, recorded_rank
from introspect.analyzers._step import Step
from introspect.hooks.sharding import observe_sharded
from introspect.records import RunShape


def rank(name, tp, *, ep=1, run=None, **sizes):
    return megatron_rank(Step(record(build(name, **sizes), **(run or {}))), Degrees(tp=tp, ep=ep))


def sent(found):
    counts = Counter()
    for transfer in found.transfers:
        counts[transfer.kind, transfer.module.split(".")[-1]] += transfer.times
    return counts


def shapes(found, ending):
    return {share.shape for share in found.shares if share.parameter.path.endswith(ending)}


@pytest.mark.parametrize("phase", ["prefill", "train"])
def test_products_equal_the_executed_ones(phase):
    run = RunShape(phase=phase, seq=8, batch=2)
    sizes = MODELS["llama"][1]
    executed = recorded_rank(observe_sharded(build("Llama", **sizes), run.with_(tp=4)))
    ours = rank("Llama", 4, run={"phase": phase, "batch": 2}, **sizes)

    def sizes_of(found):
        return Counter(
            (p.module, p.kind, p.direction, p.batch, p.m, p.k, p.n, p.flops, p.bytes) for p in found.products
        )

    assert sizes_of(ours) == sizes_of(executed)


def test_column_then_row_with_one_sum_a_block():
    found = rank("Llama", 2)

    assert shapes(found, "q_proj.weight") == {(32, 64)}
    assert shapes(found, "o_proj.weight") == {(64, 32)} or shapes(found, "o_proj.weight") == {(32, 64)}
    assert shapes(found, "down_proj.weight") == {(64, 80)}
    assert shapes(found, "input_layernorm.weight") == {(64,)}
    assert sent(found) == {
        ("all_reduce", "embed_tokens"): 1,
        ("all_reduce", "o_proj"): 2,
        ("all_reduce", "down_proj"): 2,
        ("all_gather", "lm_head"): 1,
    }


def test_a_parallel_block_sums_once():
    counts = sent(rank("Cohere", 2))

    # attention and FFN of a layer are added before anything reads them
    assert sum(count for (kind, _), count in counts.items() if kind == "all_reduce") == 1 + 2


def test_latents_and_routers_stay_whole():
    found = rank("DeepseekV3", 2, **MODELS["deepseek"][1])

    assert shapes(found, "q_a_proj.weight") == {(32, 64)}
    assert shapes(found, "kv_a_proj_with_mqa.weight") == {(24, 64)}
    assert shapes(found, "q_b_proj.weight") == {(48, 32)}
    assert set(found.remarks) == {"projects into a latent", "router"}
    # routed and shared experts of a layer are summed together
    assert sum(count for (kind, _), count in sent(found).items() if kind == "all_reduce") == 1 + 2 + 2


def test_a_fused_projection_is_cut_inside_each_part():
    found = rank("Phi3", 4, num_attention_heads=8, num_key_value_heads=2, pad_token_id=0)

    # 8 query heads give 2 a rank, the 2 KV heads one each: (2 + 1 + 1) x 8 columns
    assert shapes(found, "qkv_proj.weight") == {(32, 64)}
    assert shapes(found, "gate_up_proj.weight") == {(80, 64)}


def test_a_product_with_fewer_columns_than_ranks_stays_whole():
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    found = rank("Qwen2Moe", 2, shared_expert_intermediate_size=64, **sizes)

    assert shapes(found, "shared_expert_gate.weight") == {(1, 64)}
    assert shapes(found, "shared_expert.gate_proj.weight") == {(32, 64)}


def test_the_backward_of_experts_on_slices_of_the_tokens_is_the_executed_one():
    run = RunShape(phase="train", seq=8, batch=4)
    name, sizes = MODELS["qwen3_moe"]
    executed = recorded_rank(observe_sharded(build(name, **sizes), run.with_(tp=2, ep=4)))
    ours = rank(name, 2, ep=4, run={"phase": "train", "batch": 4}, **sizes)

    def backward(found, *modules):
        counts = Counter()
        for t in found.transfers:
            if t.direction == "backward" and t.module.endswith(modules):
                counts[t.kind, t.module, t.group, t.payload_bytes] += t.times
        return counts

    whole = ("experts", "q_norm", "k_norm")
    assert backward(ours, *whole) == backward(executed, *whole)
    assert sum(count for (kind, *_), count in backward(ours, *whole).items() if kind == "all_gather") == 2 * 2


def test_a_key_that_every_rank_makes_has_its_gradient_summed():
    found = rank("Llama", 2, run={"phase": "train"}, num_key_value_heads=1)

    gradients = {t.module.split(".")[-1] for t in found.transfers if t.direction == "backward"}
    assert shapes(found, "k_proj.weight") == {(16, 64)}
    assert gradients == {"q_proj", "gate_proj", "lm_head", "self_attn"}


@given(sizes=st.lists(st.integers(1, 96), min_size=1, max_size=3), asked=st.integers(2, 48), shared=st.booleans())
def test_nearest_degrees_really_work(sizes, asked, shared):
    limits = [Limit(what="heads", module="m", size=size, shared=shared) for size in sizes]

    for near in nearest_degrees(limits, asked):
        assert near != asked
        assert all(limit.size % near == 0 or (shared and near % limit.size == 0) for limit in limits)
