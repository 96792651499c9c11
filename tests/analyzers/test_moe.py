from __future__ import annotations

import json

import pytest
from support.tiny import LLAMA

import introspect
from introspect.analyzers._moe_traffic import Dispatch
from introspect.errors import OptionError

TINY = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "torch_dtype": "bfloat16", **LLAMA,
    "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def test_three_counts_of_parameters(tiny):
    totals = introspect.analyze("moe", tiny, phase="decode", batch=3, context=4).totals

    routed = 2 * 8 * 3 * 64 * 160  # layers x experts x matrices
    rest = totals["total"] - routed
    assert totals["routed_experts"] == routed
    assert totals["active"] == rest + routed // 4
    distinct = 8 * (1 - (6 / 8) ** 3)
    assert totals["expected_experts"] == pytest.approx(distinct)
    # the embedding is looked up: three rows of 64 instead of 512
    assert totals["expected_read_params"] == round(rest - (512 - 3) * 64 + routed * distinct / 8)


def test_balanced_routing_has_no_imbalance_and_drops_nothing(tiny):
    totals = introspect.analyze("moe", tiny, seq=64, ep=4, capacity_factor=1.0).totals

    assert (totals["imbalance"], totals["rank_imbalance"], totals["dropped_share"]) == (1, 1, 0)
    assert totals["capacity_rows"] == 64 * 2 / 8
    assert totals["slowest_rank_rows"] == 64 * 2 / 4


def test_skewed_routing_overloads_experts_and_drops_what_is_over_capacity(tiny):
    totals = introspect.analyze("moe", tiny, seq=256, routing="zipf", ep=4, capacity_factor=1.25).totals

    assert totals["imbalance"] > totals["rank_imbalance"] > 1.2
    assert 0 < totals["dropped_share"] < 1 - 1 / totals["imbalance"]


def test_rows_are_the_mean_over_all_experts(tiny):
    rows = introspect.analyze("moe", tiny, seq=64).tables["experts"].rows

    routed = {row["module"]: row for row in rows if row["kind"] == "routed"}
    assert {row["rows_per_expert"] for row in routed.values()} == {64 * 2 / 8}
    assert {row["count"] for row in routed.values()} == {2}
    assert [row["kind"] for row in rows if row["n"] == 8] == ["router"]


def test_the_exchange_is_executed_over_a_fake_group(tiny):
    rows = introspect.analyze("moe", tiny, phase="decode", batch=16, context=4, ep=4).tables["collectives"].rows

    assert {row["kind"] for row in rows} == {"all_to_all"}
    # 2 layers: the counts of 8 experts in int64; rows there and back, 16 tokens x top-2 x 64 wide x 2 B
    assert [(row["payload_bytes"], row["count"]) for row in rows] == [(8 * 8, 2), *[(16 * 2 * 64 * 2, 2)] * 2]


def test_a_dense_model_and_a_degree_that_does_not_divide_are_refused(tiny, tmp_path):
    with pytest.raises(OptionError, match=r"--ep: got 3, expected a divisor of the 8 experts: 1, 2, 4, 8"):
        introspect.analyze("moe", tiny, seq=8, ep=3)
    dense = tmp_path / "dense.json"
    dense.write_text(json.dumps({"model_type": "llama", **LLAMA}))
    with pytest.raises(OptionError, match="a model with routed experts"):
        introspect.analyze("moe", str(dense), seq=8)


def test_bytes_of_an_exchange_are_the_published_sums():
    # DeepSeek-V3, 32 tokens: 32 x 8 rows of 7168, fp8 out and bf16 back; one bf16 hidden state a token for TP
    sent = Dispatch(
        tokens=32, top_k=8, width=7168, dispatch_dtype="fp8", combine_dtype="bf16", stream_dtype="bf16"
    )  # fmt: skip

    assert (sent.dispatch_bytes, sent.combine_bytes, sent.tp_allreduce_bytes) == (1_835_008, 3_670_016, 458_752)
    assert sent.scale_bytes == 32 * 8 * 56 * 4
    degree = sent.wins_from_degree()
    assert sent.sent_by_rank(degree) < sent.tp_sent_by_rank(degree)
    assert sent.sent_by_rank(degree - 1) >= sent.tp_sent_by_rank(degree - 1)


def test_rows_cross_between_nodes_once_for_each_node():
    sent = Dispatch(tokens=10, top_k=8, width=4, dispatch_dtype="bf16", combine_dtype="bf16", stream_dtype="bf16")

    assert sent.between_nodes(1, 1) == 0
    assert sent.between_nodes(8, 4) == 10 * 4 * 7 / 8 * 4 * 2 * 2


def test_ranks_lie_evenly_on_nodes(tiny):
    with pytest.raises(OptionError, match=r"--nodes: got 3, expected a divisor of the 8 ranks of --ep"):
        introspect.analyze("moe", tiny, seq=8, ep=8, nodes=3)
    assert introspect.analyze("moe", tiny, seq=8, nodes=2).totals["remote_share"] == 1 / 2  # a rank on each
    with pytest.raises(OptionError, match="capacity_factor: got 0, expected a number above 0"):
        introspect.analyze("moe", tiny, seq=8, capacity_factor=0)


def test_crossing_is_limited_and_never_more_than_leaves_a_rank(tiny):
    free, limited = (
        introspect.analyze("moe", tiny, seq=8, ep=4, nodes=4, max_nodes_per_token=most).totals for most in (None, 1)
    )

    met = 4 * (1 - 15 / 28)  # C(6, 2) of C(8, 2) choices leave a node of two experts out
    assert free["node_crossing_bytes_per_layer"] == round(8 * met * 3 / 4 * 64 * 2 * 2)
    assert limited["node_crossing_bytes_per_layer"] == 8 * 3 / 4 * 64 * 2 * 2
    sent = free["dispatch_bytes_per_layer"] + free["combine_bytes_per_layer"]
    assert free["node_crossing_bytes_per_layer"] <= sent * free["remote_share"]


def test_code_that_multiplies_every_expert_is_counted_by_what_is_routed(tmp_path):
    path = tmp_path / "config.json"
    sizes = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96}
    path.write_text(json.dumps({"model_type": "llama4_text", "torch_dtype": "bfloat16", **sizes}))
    result = introspect.analyze("moe", str(path), seq=32, routing="uniform", ep=2, capacity_factor=1.0)

    (routed, *_) = [row for row in result.tables["experts"].rows if row["kind"] == "routed"]
    assert routed["rows_per_expert"] == 32 / 4  # the code multiplies 32 in each
    balanced, uniform, _ = result.tables["policies"].rows
    assert (balanced["dropped_share"], balanced["slowest_rank_rows"]) == (0, 16)
    assert 0 < uniform["dropped_share"] == result.totals["dropped_share"] < 0.5
    assert any("every expert by every token, 128 rows" in note for note in result.notes)


def test_every_policy_stands_beside_the_others(tiny):
    result = introspect.analyze("moe", tiny, seq=256, routing="zipf", ep=4, capacity_factor=1.25)

    rows = {row["routing"]: row for row in result.tables["policies"].rows}
    assert list(rows) == ["balanced", "uniform", "zipf"]
    assert rows["balanced"]["imbalance"] < rows["uniform"]["imbalance"] < rows["zipf"]["imbalance"]
    assert {row["rows_mean"] for row in rows.values()} == {256 * 2 / 8}
    asked = rows["zipf"]
    for name in ("imbalance", "rank_imbalance", "slowest_rank_rows", "dropped_share"):
        assert asked[name] == result.totals[name]
    assert asked["busy_experts"] == result.totals["simulated_experts"]


def test_a_stored_record_answers_for_its_own_policy(tiny):
    trace = introspect.trace(tiny, seq=64, routing="uniform")

    rows = introspect.analyze("moe", trace).tables["policies"].rows
    assert [row["routing"] for row in rows] == ["uniform"]
