from __future__ import annotations

from support.ranks import DEEPSEEK
from support.tiny import build, record

from introspect.hooks.routers import routers

SIZES = DEEPSEEK | {"n_routed_experts": 16, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 1}


def rows(**run):
    trace = record(build("DeepseekV3", **SIZES), **run)
    return [op.experts.rows for op, _ in trace.walk() if op.experts is not None]


def test_routers_are_found_beside_their_experts():
    model = build("DeepseekV3", **SIZES)

    (found,) = routers(model)
    assert found.weight is model.model.layers[1].mlp.gate.weight
    assert [tuple(vector.shape) for vector in found.corrections] == [(16,)]
    assert list(routers(build("Llama"))) == []


def test_the_groups_that_a_router_keeps_are_respected():
    # one token keeps one group of four experts
    for seed in range(5):
        for counts in rows(phase="decode", context=4, routing="uniform", seed=seed):
            groups = {expert // 4 for expert, count in enumerate(counts) if count}
            assert sum(counts) == 2
            assert len(groups) == 1


def test_seeds_repeat_and_differ():
    assert rows(seq=64, routing="zipf", seed=1) == rows(seq=64, routing="zipf", seed=1)
    assert rows(seq=64, routing="zipf", seed=1) != rows(seq=64, routing="zipf", seed=2)


def test_zipf_is_more_skewed_than_uniform_through_the_router():
    (zipf, *_), (uniform, *_) = rows(seq=512, routing="zipf"), rows(seq=512, routing="uniform")

    assert max(zipf) > 1.5 * max(uniform)
