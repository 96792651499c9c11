from __future__ import annotations

import torch
from support.tiny import build
from torch import nn

from introspect.hooks.routes import gather_routes


def test_counters_and_twin_speak_of_a_dense_model():
    record = gather_routes(build("Llama"), tokens=8)

    torch_route, fvcore_route = record.counters
    weights = 2 * (2 * (64 * 64 + 64 * 32) + 3 * 64 * 160) + 64 * 512
    assert torch_route.flops["matrix"] == fvcore_route.flops["linear"] == 2 * 8 * weights
    assert torch_route.silent == ()
    assert record.twin is not None
    assert record.twin.verified


def test_experts_are_where_torchs_counter_is_silent():
    record = gather_routes(build("Mixtral", num_local_experts=4, dtype=torch.bfloat16), tokens=8)

    assert record.counters[0].silent == ("aten._grouped_mm",)
    assert "aten::_grouped_mm" in record.counters[1].silent


def test_a_route_that_fails_says_why_and_stops_nothing():
    record = gather_routes(nn.Linear(2, 2, device="meta"), tokens=8)

    assert {route.problem.split(":")[0] for route in record.counters} == {"TypeError"}
    assert (record.twin, record.twin_problem) == (None, "no transformers model")
