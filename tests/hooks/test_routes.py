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


def test_counters_see_a_modules_own_inputs():
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 16, 5)).to("meta")

    record = gather_routes(net, tokens=8, inputs={"input": torch.zeros(2, 3, 4, 4)})

    conv, linear = 2 * 2 * 16 * 8 * 27, 2 * 2 * 8 * 16 * 5
    assert record.given
    assert [route.problem for route in record.counters] == ["", ""]
    assert [route.flops for route in record.counters] == [
        {"conv": conv, "matrix": linear},
        {"conv": conv, "linear": linear},
    ]


def test_what_fvcore_cannot_price_is_no_zero():
    record = gather_routes(nn.LSTM(4, 8).to("meta"), tokens=8, inputs={"input": torch.zeros(5, 2, 4)})

    assert record.counters[1].flops == {}
    assert record.counters[1].silent[0] == "aten::lstm"


def test_a_route_that_fails_says_why_and_stops_nothing():
    record = gather_routes(nn.Linear(2, 2, device="meta"), tokens=8)

    assert {route.problem.split(":")[0] for route in record.counters} == {"TypeError"}
    assert (record.twin, record.twin_problem) == (None, "a plain module has no config to be shrunk by")
