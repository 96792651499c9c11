"""The page of conventions against what the commands answer: figures, totals and components."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.traces import llama

import introspect
from introspect.analyzers._components import COMPONENTS
from introspect.gpus import load_gpus

PAGE = (Path(__file__).parents[1] / "docs" / "conventions.md").read_text(encoding="utf-8")
FIGURES = {
    cells[0]: cells[2]
    for line in PAGE.partition("## Where a usual figure differs")[2].splitlines()
    if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 4
}


def totals(command, model, **options):
    return introspect.analyze(command, model, offline=True, no_cache=True, **options).totals


@pytest.mark.parametrize("command", ["trace", "params"])
def test_every_total_is_defined(command):
    assert [name for name in introspect.analyze(command, llama()).totals if f"`{name}`" not in PAGE] == []


def test_every_component_has_a_row():
    assert [component for component in COMPONENTS if f"| `{component}` |" not in PAGE] == []


def test_decode_of_llama_3_8b():
    read = totals("trace", "meta-llama/Meta-Llama-3-8B", phase="decode", context=1)["weight_bytes_read"]
    seconds = read / load_gpus()["h100-sxm"].bandwidth_bytes_per_second
    assert FIGURES["Llama-3-8B batch-1 decode on H100"] == f"{1000 * seconds:.2f} ms, {1 / seconds:.0f} tok/s"


def test_prefill_of_llama_3_8b():
    found = totals("trace", "meta-llama/Meta-Llama-3-8B", seq=8192)
    dense, engine = (f"{found[name] / 1e12:.1f} T" for name in ("total_flops", "engine_flops"))
    assert FIGURES["Llama-3-8B prefill of 8192"] == f"{dense} dense, {engine} engine"


def test_flops_a_token_of_llama_3_70b():
    flops = totals("trace", "meta-llama/Meta-Llama-3-70B", phase="decode")["weight_flops"]
    assert FIGURES["Llama-3-70B FLOPs a token"] == f"{flops / 1e9:.1f} G"


@pytest.fixture(scope="module")
def deepseek():
    return introspect.trace("deepseek-ai/DeepSeek-V3", phase="decode", offline=True, cache=False)


def test_decode_of_deepseek_v3(deepseek):
    found = introspect.analyze("trace", deepseek).totals
    executed, engine = found["total_flops"] / 1e9, found["engine_flops"] / 1e9
    assert FIGURES["DeepSeek-V3 decode at 2048"] == f"{executed:,.0f} G executed, {engine:.2f} G engine"


def test_flops_a_token_of_deepseek_v3(deepseek):
    rows = introspect.analyze("trace", deepseek, view="engine").tables["gemms"].rows
    weights = sum(row["flops"] for row in rows if not row["kind"].startswith("attention"))
    assert FIGURES["DeepSeek-V3 FLOPs a token"] == f"{weights / 1e9:.2f} G"


def test_cache_of_deepseek_v3(deepseek):
    call = next(op.attention for op in deepseek.ops if op.attention)
    widths = sum(deepseek.tensors[t].shape[-1] for t in (call.k, call.v))
    held = sum(entry.shape_after[-1] for entry in deepseek.cache if entry.layer == 0)
    ratio = call.kv_heads * widths / held  # 128 x (192 + 128) against 512 + 64
    assert FIGURES["DeepSeek-V3 cache, MHA against MLA"] == f"{ratio:.0f} x"
