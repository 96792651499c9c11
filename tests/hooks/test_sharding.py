from __future__ import annotations

import os

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.ranks import CASES, predicted, run_ranks
from support.tiny import build
from torch.testing._internal.distributed.fake_pg import FakeStore

from introspect.errors import ShardingError
from introspect.hooks.sharding import fake_group, observe_sharded
from introspect.records import RunShape


def observed(name, rank=0, *, tp=1, ep=1, **sizes):
    return observe_sharded(build(name, **sizes), RunShape(seq=8, tp=tp, ep=ep), rank)


def test_the_process_is_left_as_found():
    before = dict(os.environ)

    observed("Llama", tp=2)

    assert not dist.is_initialized()
    assert dict(os.environ) == before


def test_the_process_is_left_as_found_after_an_error():
    before = dict(os.environ)

    with pytest.raises(ZeroDivisionError), fake_group(4):
        1 / (dist.get_world_size() - 4)

    assert not dist.is_initialized()
    assert dict(os.environ) == before


def test_a_group_that_is_there_already_is_not_touched():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    try:
        with pytest.raises(ShardingError, match=r"process group.*one is initialised already"):
            observed("Llama", tp=2)
        assert dist.get_world_size() == 3
    finally:
        dist.destroy_process_group()


@given(rows=st.integers(40, 60), tp=st.sampled_from([2, 4]))
def test_shards_of_an_uneven_vocabulary_sum_to_the_whole(rows, tp):
    tables = []
    for rank in range(tp):
        parameters = observed("Llama", rank, tp=tp, num_key_value_heads=4, vocab_size=rows).parameters
        tables.append(next(p for p in parameters if p.path == "lm_head.weight"))

    assert sum(table.shape[0] for table in tables) == rows
    assert {table.global_shape for table in tables} == {(rows, 64)}


def test_a_tied_table_is_sharded_once():
    trace = observed("Llama", tp=2, tie_word_embeddings=True)
    found = {p.path: p for p in trace.parameters}

    assert found["model.embed_tokens.weight"].shape == (256, 64)
    assert found["lm_head.weight"].tied_to == "model.embed_tokens.weight"


def test_an_empty_plan_is_named():
    with pytest.raises(ShardingError, match="an empty tp_plan"):
        observed("GPT2", tp=2)
    with pytest.raises(ShardingError, match="an empty ep_plan"):
        observed("Llama", ep=2)


def test_a_refusal_says_where_the_code_failed():
    with pytest.raises(ShardingError, match=r"cannot shard \(tp 4\): RuntimeError: shape .* llama/modeling_llama.py"):
        observed("Llama", tp=4)  # 2 KV heads


def test_experts_that_do_not_divide_and_unrelated_degrees_are_named():
    sizes = {"num_local_experts": 6, "num_experts_per_tok": 2}
    with pytest.raises(ShardingError, match="Cannot evenly shard 6 experts across 4"):
        observed("Mixtral", ep=4, **sizes)
    with pytest.raises(ShardingError, match="3 is no multiple of 2"):
        observed("Mixtral", tp=2, ep=3, **sizes)


def compare(tmp_path, ranks):
    done = run_ranks(tmp_path, ranks)
    for rank in range(ranks):
        for case, found in zip(CASES[ranks], done[rank], strict=True):
            assert found == predicted(case, rank), (case, rank)


def test_two_real_processes_do_what_was_predicted(tmp_path):
    compare(tmp_path, 2)


@pytest.mark.sweep
def test_four_real_processes_do_what_was_predicted(tmp_path):
    compare(tmp_path, 4)
