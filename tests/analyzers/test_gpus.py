"""The list of accelerators as a table."""

from __future__ import annotations

from introspect.analyzers.gpus import Params, analyze
from introspect.gpus import load_gpus


def test_one_row_a_gpu_with_its_source():
    rows = analyze(Params()).tables["gpus"].rows
    assert [row["gpu"] for row in rows] == list(load_gpus())
    assert all(row["source"] and row["retrieved"] for row in rows)


def test_golden_h100():
    row = next(row for row in analyze(Params()).tables["gpus"].rows if row["gpu"] == "h100-sxm")
    assert row["fp8_flops_per_second"] == 19789 * 10**11  # half of the product page's sparse 3,958, before rounding
    assert row["memory_bytes"] == 80 * 10**9
    assert row["fp4_flops_per_second"] is None
