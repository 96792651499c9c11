from __future__ import annotations

from support.tiny import build, record

LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16,
    "num_key_value_heads": 4, "index_n_heads": 2, "index_head_dim": 16,
}  # fmt: skip


def pairs(trace):
    return {op.attention.visible_pairs for op, _ in trace.walk() if op.attention}


def test_sparse_attention_sees_its_selected_keys_inside_the_causal_mask():
    model = build("DeepseekV32", index_topk=8, **LATENT)

    # 8 rows that grow to 8 keys, then 24 rows of 8
    assert pairs(record(model, seq=32)) == {8 * 9 // 2 + 24 * 8}
    assert pairs(record(model, phase="decode", context=64)) == {8}
    assert pairs(record(model, phase="decode", context=4)) == {5}


def test_a_bias_laid_over_a_causal_mask_keeps_its_pairs():
    trace = record(build("Doge", keep_window_size=1000), seq=16)

    assert pairs(trace) == {16 * 17 // 2}
    assert not [d for d in trace.decisions if d.answered == "assumed"]


def test_compressed_entries_behind_the_window_are_counted_and_the_approximation_said():
    trace = record(build("DeepseekV4", num_hidden_layers=4), phase="decode", context=64)

    assert max(pairs(trace)) > min(pairs(trace)) > 0
    assert any("compressed entries" in text for text in trace.assumptions)
