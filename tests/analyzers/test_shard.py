from __future__ import annotations

import json

import pytest
from support.tiny import LLAMA

import introspect
from introspect.errors import OptionError, ShardingError

CONFIGS = {
    "llama": {"model_type": "llama", **LLAMA, "num_attention_heads": 8, "num_key_value_heads": 4},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512, "n_positions": 64},
    "olmo2": {"model_type": "olmo2", **LLAMA},
    "phi3": {
        "model_type": "phi3",
        **LLAMA,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "pad_token_id": 0,
    },
    "mamba": {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512, "state_size": 8},
    "falcon": {
        "model_type": "falcon",
        **LLAMA,
        "num_attention_heads": 8,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
    },
    "mixtral": {"model_type": "mixtral", **LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2},
}
SEQ = 16


@pytest.fixture
def model(tmp_path):
    def write(name, **changes):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"torch_dtype": "bfloat16", **CONFIGS[name], **changes}))
        return str(path)

    return write


def shard(path, **options):
    return introspect.analyze("shard", path, **{"seq": SEQ, **options})


def test_both_routes_agree_where_the_plan_shards_everything(model):
    result = shard(model("llama"), tp=4)

    assert result.run["route"] == "transformers"
    assert all(row["same"] for row in result.tables["routes"].rows)


def test_a_model_without_a_plan_is_cut_by_megatrons_rules(model):
    result = shard(model("gpt2"), tp=4)

    assert result.run["route"] == "megatron"
    assert "an empty tp_plan" in result.notes[0]
    fused = next(row for row in result.tables["gemms"].rows if row["module"].endswith("c_attn"))
    assert fused["n"] == 3 * 64 // 4


def test_kv_heads_are_held_by_several_ranks_where_there_are_fewer(model):
    totals = shard(model("llama"), tp=8).totals

    assert (totals["query_heads_per_rank"], totals["kv_heads_per_rank"], totals["kv_replication"]) == (1, 1, 2)
    assert totals["kv_bytes_per_token_per_rank"] == 2 * 2 * 8 * 2  # layers x (k, v) x head width x bf16


def test_kv_heads_that_several_ranks_hold_are_replicated(model):
    result = shard(model("llama"), tp=8)
    fused = shard(model("phi3"), tp=8, engine="megatron")

    rows = {row["parameter"]: row for row in result.tables["parameters"].rows}
    key = rows["model.layers.*.self_attn.k_proj.weight"]
    assert (key["copies"], key["sharded_bytes"], key["replicated_bytes"]) == (2, 0, 2 * 8 * 64 * 2)  # layers x [8, 64]
    norms = 5 * 64 * 2
    assert result.totals["weight_bytes_replicated_per_rank"] == 2 * key["replicated_bytes"] + norms  # k and v
    rows = {row["parameter"]: row for row in fused.tables["parameters"].rows}
    fused_row = rows["model.layers.*.self_attn.qkv_proj.weight"]
    # a rank's query head is its own; its key head and value head, 8 rows each, are on two ranks
    assert (fused_row["sharded_bytes"], fused_row["replicated_bytes"]) == (2 * 8 * 64 * 2, 2 * 16 * 64 * 2)


@pytest.mark.parametrize("name", ["olmo2", "phi3"])
def test_a_plan_that_gathers_queries_and_keys_is_not_taken_by_default(model, name):
    path = model(name, num_attention_heads=8, num_key_value_heads=4)
    executed = shard(path, tp=2, engine="transformers")
    result = shard(path, tp=2)

    assert result.run["route"] == "megatron"
    assert (executed.totals["query_heads_per_rank"], executed.totals["kv_replication"]) == (8, 2)
    assert (result.totals["query_heads_per_rank"], result.totals["kv_replication"]) == (4, 1)
    assert result.totals["kv_bytes_per_token_per_rank"] == executed.totals["kv_bytes_per_token_per_rank"] / 2
    words = "attention is whole on every rank with its 8 query heads, and so is the cache, 256 B a token"
    assert result.notes[0].startswith("Megatron's rules: the model's own plan cuts weights of the attention")
    assert result.notes[0].endswith(words)
    assert executed.notes[0].endswith(words)


def test_megatrons_refusal_is_named_where_only_the_plan_answers(model):
    result = shard(model("phi3", num_attention_heads=8, num_key_value_heads=2, hidden_size=96), tp=3)

    assert (result.run["route"], result.totals["kv_replication"]) == ("transformers", 3)
    assert "not Megatron's rules: cannot shard (tp 3): 2 KV heads" in result.notes[0]
    assert "attention is whole on every rank" in result.notes[1]
    assert "gathers the results of model.layers.*.mlp.gate_up_proj" in result.notes[2]


@pytest.mark.parametrize("tp", [64, 1024, 1_000_000])
def test_more_ranks_than_columns_are_refused(model, tp):
    with pytest.raises(ShardingError, match=rf"8 query heads of .* do not divide by {tp}|160 columns") as error:
        shard(model("llama"), tp=tp)
    assert error.value.expected == "--tp 8"
    with pytest.raises(ShardingError, match=f"do not divide by {tp}"):
        shard(model("llama"), tp=tp, engine="transformers")


def test_ranks_among_which_nothing_can_be_shared_out_are_refused(model):
    with pytest.raises(ShardingError, match=r"tp 5000\): no weight can be cut into as many parts"):
        shard(model("mamba"), tp=5000)


def test_keys_that_the_code_repeats_before_it_keeps_them_are_named(model):
    result = shard(model("falcon"), tp=8, phase="decode")

    assert (result.totals["kv_heads_per_rank"], result.totals["kv_bytes_per_token_per_rank"]) == (1, 2 * 2 * 8 * 2)
    (note,) = (note for note in result.notes if "repeats" in note)
    assert "repeats the 2 KV heads that its weights make to 8" in note
    assert note.endswith("An engine that keeps 2 holds 1 a rank, on 4 ranks each, 64 B a token")


def test_what_an_option_did_not_do_is_said(model):
    alone = shard(model("llama"), engine="transformers", sequence_parallel=True, vocabulary_multiple=128)
    plan = shard(model("llama"), tp=2, vocabulary_multiple=128, batch=2, microbatches=2)

    assert alone.run["route"] == "transformers"
    assert [note.split(":")[0] for note in alone.notes] == [
        "--sequence-parallel changes nothing",
        "--vocabulary-multiple 128 pads nothing",
    ]
    assert "--vocabulary-multiple 128 pads nothing: transformers cuts the vocabulary as it is" in plan.notes
    assert "--microbatches changes nothing: there is one pipeline stage (--pp 1)" in plan.notes
    with pytest.raises(ShardingError, match="the model has no routed experts; expected --ep 1"):
        shard(model("llama"), ep=2)


def test_a_degree_that_does_not_divide_names_the_size_and_the_nearest_degrees(model):
    with pytest.raises(ShardingError, match=r"4 KV heads of .*k_proj do not divide by 3") as error:
        shard(model("llama"), tp=3)
    assert error.value.expected == "--tp 2 or 4"
    with pytest.raises(ShardingError, match=r"4 KV heads .* do not divide by 8.* invalid for input"):
        shard(model("llama"), tp=8, engine="transformers")
    with pytest.raises(ShardingError, match=r"8 experts .* do not divide by 3.*--ep 2 or 4"):
        shard(model("mixtral"), ep=3)


@pytest.mark.parametrize("name", ["llama", "gpt2", "olmo2", "mixtral"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shards_sum_to_the_whole(model, name, tp):
    result = shard(model(name), tp=tp, engine="megatron")

    rows, totals = result.tables["parameters"].rows, result.totals
    for row in rows:
        # shared out exactly, held whole by all, or KV heads held by several
        assert row["copies"] == 1 or row["shape"] == row["whole_shape"] or tp % row["copies"] == 0
    held = sum(row["sharded_bytes"] * tp + row["replicated_bytes"] * tp / row["copies"] for row in rows)
    assert held == totals["weight_bytes"]
    assert sum(row["replicated_bytes"] for row in rows) == totals["weight_bytes_replicated_per_rank"]
    assert sum(row["sharded_bytes"] for row in rows) == totals["weight_bytes_sharded_per_rank"]


def test_wire_bytes_follow_the_ring(model):
    rows = shard(model("llama"), tp=4).tables["collectives"].rows

    reduced = [row for row in rows if row["kind"] == "all_reduce"]
    payload = SEQ * 64 * 2
    assert sum(row["count"] for row in reduced) == 2 * 2 + 1  # two a layer and the embedding's
    assert {row["bytes_each"] for row in reduced} == {payload}
    assert {row["wire_bytes_each"] for row in reduced} == {2 * 3 * payload // 4}
    (gathered,) = (row for row in rows if row["kind"] == "all_gather")
    assert gathered["wire_bytes_each"] == 3 * (SEQ * 512 * 2) // 4


def test_sequence_parallelism_sends_as_much_in_other_pieces(model):
    plain, scattered = (shard(model("llama"), tp=4, sequence_parallel=on) for on in (False, True))

    kinds = {row["kind"] for row in scattered.tables["collectives"].rows}
    assert kinds == {"reduce_scatter", "all_gather"}
    assert scattered.totals["wire_bytes_per_step"] == plain.totals["wire_bytes_per_step"]


def test_a_norm_over_all_heads_needs_an_all_reduce_of_a_number_a_token(model):
    result = shard(model("olmo2"), tp=2, engine="megatron")

    rows = [row for row in result.tables["collectives"].rows if "q_norm" in row["module"]]
    assert [(row["kind"], row["bytes_each"]) for row in rows] == [("all_reduce", SEQ * 4)]
    assert any("q_norm" in note and "normalised over all ranks' channels" in note for note in result.notes)


def test_a_padded_vocabulary_shows(model):
    result = shard(model("llama", vocab_size=509), tp=4, engine="megatron")

    table = next(row for row in result.tables["parameters"].rows if row["parameter"] == "lm_head.weight")
    assert (table["shape"], table["copies"]) == ([128, 64], 512 / 509)
    wider = shard(model("llama"), tp=4, engine="megatron", vocabulary_multiple=96)
    assert next(row for row in wider.tables["gemms"].rows if row["module"] == "lm_head")["n"] == 192


def test_stages_hold_everything_once_and_wait(model):
    result = shard(model("llama", num_hidden_layers=5), pp=3, batch=4, microbatches=4)

    stages = result.tables["stages"].rows
    assert [row["layers"] for row in stages] == ["0-1", "2-3", "4"]
    assert sum(row["weight_bytes"] for row in stages) == result.totals["weight_bytes"]
    assert result.totals["pp_bubble_share"] == 2 / 6
    with pytest.raises(ShardingError, match="5 layers; expected at most 5 stages"):
        shard(model("llama", num_hidden_layers=5), pp=6)
    with pytest.raises(OptionError, match="--microbatches: got 3, expected a divisor of the 4 sequences"):
        shard(model("llama"), pp=2, batch=4, microbatches=3)


def test_cross_entropy_is_of_the_last_stage_and_a_scattered_stream_is_handed_on_in_parts(model):
    options = {"tp": 4, "pp": 2, "batch": 2, "microbatches": 2, "phase": "train", "engine": "megatron"}
    path = model("llama", vocab_size=8192)  # the head makes the last stage the slowest
    whole, scattered = (shard(path, **options, sequence_parallel=on) for on in (False, True))

    tokens = 2 * SEQ
    for result, part in ((whole, 1), (scattered, 4)):
        rows = result.tables["collectives"].rows
        assert "figures are of a rank of stage 1, the slowest; the table of stages has all" in result.notes
        entropy = [row for row in rows if row["module"] == "lm_head" and row["bytes_each"] == 4 * tokens]
        assert [(row["kind"], row["count"]) for row in entropy] == [("all_reduce", 3)]
        assert any(note.startswith("cross-entropy over a cut vocabulary") for note in result.notes)
        assert all(row["module"] for row in rows)
        (send,) = (row for row in rows if row["kind"] == "send")
        assert send["bytes_each"] == tokens * 64 * 2 // part


def test_a_scattered_backward_gathers_each_blocks_input_again(model):
    result = shard(model("llama"), tp=4, phase="train", engine="megatron", sequence_parallel=True)

    stream = [row for row in result.tables["collectives"].rows if row["bytes_each"] == SEQ * 64 * 2]
    counts = {(row["kind"], row["direction"]): 0 for row in stream}
    for row in stream:
        counts[row["kind"], row["direction"]] += row["count"]
    sums = 2 * 2 + 1  # two a layer and the embedding's
    assert counts == {
        ("reduce_scatter", "forward"): sums,
        ("all_gather", "forward"): sums,
        ("reduce_scatter", "backward"): sums,
        ("all_gather", "backward"): 2 * sums,
    }
    assert any(note.startswith("not counted: summing the gradients of weights") for note in result.notes)


def test_tiles_that_are_not_full_are_listed(model):
    rows = shard(model("llama"), tp=4).tables["tiles"].rows

    down = next(row for row in rows if row["module"].endswith("down_proj") and row["dimension"] == "k")
    assert (down["size"], down["over_64"], down["waste_64"]) == (40, 40, 1 - 40 / 64)


def test_experts_spread_over_more_ranks_than_share_a_batch(model):
    executed = shard(model("mixtral"), tp=2, ep=8, batch=4, engine="transformers")
    megatron = shard(model("mixtral"), tp=2, ep=8, batch=4, engine="megatron")

    def experts(result):
        return [
            (row["batch"], row["m"], row["k"], row["n"])
            for row in result.tables["gemms"].rows
            if row["kind"] == "grouped"
        ]

    # 4 groups x 4 x 16 tokens x top-2 over 8 experts, one a rank
    assert experts(executed) == experts(megatron) == [(1, 64, 64, 320), (1, 64, 160, 64)]
    sent = [row for row in megatron.tables["collectives"].rows if row["kind"] == "all_to_all"]
    assert [(row["count"], row["bytes_each"]) for row in sent] == [(4, 4 * SEQ * 2 * 64 * 2 // 2)]
