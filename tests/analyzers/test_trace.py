"""`trace` on records made by hand with the sums beside, and laws on small real models."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from support.tiny import build, record
from support.traces import HEADS, HIDDEN, INNER, KV_HEADS, VOCABULARY, WIDTH, Recording, latent_model, llama, moe_ffn

import introspect
from introspect.analyzers.trace import Params, analyze
from introspect.records import Unclassified

LAYER = HIDDEN * WIDTH * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * INNER
PRODUCTS = 2 * LAYER + HIDDEN * VOCABULARY  # weights that are multiplied by


def ask(trace, **options):
    return analyze(Params(**options), lambda run: trace)


def rows(result, table="gemms", **wanted):
    return [row for row in result.tables[table].rows if all(row[name] == value for name, value in wanted.items())]


def test_prefill_totals():
    # 2 sequences of 6: 12 tokens; 6 x 6 dense and 21 visible pairs a sequence, 2 layers
    totals = ask(llama(batch=2, seq=6)).totals
    assert totals["weight_flops"] == 2 * PRODUCTS * 12
    assert totals["attention_flops"] == 2 * (4 * 2 * 36 * HEADS * WIDTH)
    assert totals["attention_flops_causal"] == 2 * (4 * 2 * 21 * HEADS * WIDTH)
    assert totals["total_flops"] == totals["weight_flops"] + totals["attention_flops"]
    last = 2 * (12 - 2) * HIDDEN * VOCABULARY  # the head runs on two positions instead of twelve
    assert totals["engine_flops"] == totals["weight_flops"] + totals["attention_flops_causal"] - last


def test_decode_totals():
    totals = ask(llama(phase="decode", batch=1, seq=1, context=40)).totals
    assert totals["total_flops"] == totals["engine_flops"] == 2 * PRODUCTS + 2 * 4 * 41 * HEADS * WIDTH
    assert totals["weight_bytes_read"] == 2 * (PRODUCTS + 5 * HIDDEN + HIDDEN)  # norms, and one row of the table
    assert totals["kv_bytes_read"] == 40 * 2 * 2 * KV_HEADS * WIDTH * 2
    assert totals["kv_bytes_written"] == 2 * 2 * KV_HEADS * WIDTH * 2


def test_equal_layers_share_a_row():
    result = ask(llama(layers=3, ffn={0: None, 1: moe_ffn("layers.1.moe"), 2: moe_ffn("layers.2.moe")}.get))
    (q,) = rows(result, module="layers.*.attn.q")
    assert (q["count"], q["layers"], q["m"], q["k"], q["n"]) == (3, "0-2", 6, HIDDEN, HEADS * WIDTH)
    assert q["flops"] == 3 * 2 * 6 * HIDDEN * HEADS * WIDTH
    assert q["params"] == 3 * HIDDEN * HEADS * WIDTH
    (dense,) = rows(result, module="layers.*.ffn.up")
    (routed,) = rows(result, module="layers.*.moe.experts.down")
    assert (dense["layers"], dense["count"]) == ("0", 1)
    assert (routed["layers"], routed["count"], routed["batch"], routed["m"]) == ("1-2", 2, 8, 12 / 8)


def test_per_layer():
    result = ask(llama(), per_layer=True)
    assert [row["layers"] for row in rows(result, n=INNER, k=HIDDEN)] == ["0", "0", "1", "1"]
    assert rows(result, module="layers.1.attn.q")[0]["count"] == 1


def test_attention_rows():
    result = ask(llama(batch=2, seq=6))
    (scores,), (context,) = rows(result, kind="attention_qk"), rows(result, kind="attention_pv")
    assert (scores["batch"], scores["m"], scores["k"], scores["n"]) == (2 * HEADS, 6, WIDTH, 6)
    assert (context["batch"], context["m"], context["k"], context["n"]) == (2 * HEADS, 6, 6, WIDTH)
    assert (scores["query_heads"], scores["kv_heads"], scores["group"]) == (HEADS, KV_HEADS, HEADS // KV_HEADS)
    assert scores["masked_flops"] * 36 == scores["flops"] * 21


def test_fused():
    result = ask(llama(), fuse=True)
    (qkv,) = rows(result, module="layers.*.attn.q+k+v")
    assert (qkv["n"], qkv["count"]) == ((HEADS + 2 * KV_HEADS) * WIDTH, 2)
    assert rows(result, module="layers.*.ffn.gate+up")[0]["n"] == 2 * INNER
    assert sum(row["count"] for row in rows(result, kind="linear")) == 2 * 4 + 1


def test_intensity_of_one_row():
    (q,) = rows(ask(llama(phase="decode", seq=1, context=40)), module="layers.*.attn.q")
    assert q["intensity"] == pytest.approx(2 * 32 * 32 / (2 * (32 + 32 * 32 + 32)))


def test_engine_view_lists_what_engine_flops_counts():
    trace = latent_model(phase="decode", seq=1, context=40)
    result = ask(trace, view="engine")
    assert sum(row["flops"] for row in rows(result)) == result.totals["engine_flops"]
    assert [row["n"] for row in rows(result, module="layers.*.attn.kv_b")] == [27, 7]
    executed, shown = (dict(found.totals) for found in (ask(trace), result))
    assert executed.pop("gemm_bytes") > shown.pop("gemm_bytes") == sum(row["bytes"] for row in rows(result))
    assert executed == shown


def test_the_self_audit():
    notes = ask(llama(seq=6)).notes
    outside = 5 * HIDDEN + HIDDEN * VOCABULARY
    assert notes[0] == f"parameters: {PRODUCTS:,} in products + {outside:,} outside = {PRODUCTS + outside:,}"
    assert notes[1].startswith(f"2NT = 2 x {PRODUCTS + outside:,} x 6 tokens = {2 * (PRODUCTS + outside) * 6:,} FLOPs")
    assert notes[2] == "ops without a cost rule: 0"


def test_a_module_without_parameters_has_no_2nt():
    r = Recording(seq=5)
    r.op("relu", (r.tensor((5, 8)),), (5, 8))
    assert ask(r.trace(), seq=5).notes == (
        "parameters: 0 in products + 0 outside = 0",
        "ops without a cost rule: 0",
    )


def test_unclassified_ops_are_named():
    odd = Unclassified(op="aten.odd.default", module="layers.0", count=3)
    result = ask(replace(llama(), unclassified=(odd,)))
    assert result.unclassified == ("aten.odd.default in layers.0 (3)",)
    assert result.notes[2] == "ops without a cost rule: 3"


@pytest.mark.parametrize("form", ["mermaid", "dot"])
def test_a_drawing_has_one_layer_of_each_kind_and_a_shape_on_every_edge(form):
    ffn = {0: None, 1: None, 2: moe_ffn("layers.2.moe")}
    text = ask(llama(layers=3, ffn=ffn.get), format=form).text
    assert "layers.* (0-1)" in text
    assert "layers.* (2)" in text
    assert "outside the layers" in text
    assert "moe.experts.gate_up" in text
    assert "ops without a cost rule: 0" in text.splitlines()[-1]
    edges = [line for line in text.splitlines() if "-->" in line or "->" in line]
    assert edges
    assert all(re.search(r'"\d+( x \d+)*"', edge) for edge in edges)
    nodes = set(re.findall(r"^ {4}(\w+)[(\[ ]", text, flags=re.MULTILINE))
    ends = {end for edge in edges for end in re.findall(r"\b(?:n|in)\d+\b", edge)}
    assert ends <= nodes


@pytest.mark.parametrize("routing", ["balanced", "uniform", "zipf"])
@pytest.mark.parametrize("phase", ["prefill", "train"])
def test_sizes_of_a_grouped_row_are_means_that_give_its_flops(phase, routing):
    trace = record(build("Mixtral", num_local_experts=8), phase=phase, seq=5, routing=routing)
    grouped = [row for row in rows(ask(trace)) if row["kind"] == "grouped"]

    assert grouped
    for row in grouped:
        sizes = row["count"] * row["batch"] * row["m"] * row["k"] * row["n"]
        assert 2 * sizes == pytest.approx(row["flops"], rel=1e-12)
    if routing == "balanced":
        assert {row["m"] for row in grouped if row["direction"] != "dw"} == {5 * 2 / 8}


def test_what_a_token_uses_stands_beside_all_parameters():
    trace = record(build("Mixtral", num_local_experts=4))
    notes = ask(trace).notes
    total, active = (int(re.search(r"2 x ([\d,]+) x", line)[1].replace(",", "")) for line in notes if "2N" in line)

    assert total - active == 2 * 2 * 3 * 64 * 160  # 2 layers, 2 of 4 experts idle, three matrices
    assert active == introspect.analyze("params", trace).totals["active"]


def test_the_record_itself_is_a_form_that_every_command_reads(tmp_path):
    trace = record(build("Llama"), phase="decode", context=8)
    path = tmp_path / "record.json"
    path.write_text(ask(trace, format="record").text + "\n")

    assert introspect.load_trace(path) == trace
    assert introspect.analyze("kv", str(path), context=8).totals["bytes_per_token"] == 2 * 2 * 2 * 16 * 4


def test_boxes_are_joined_and_equal_layers_are_a_loop():
    text = ask(llama(layers=3), format="dot").text
    outside, layer = (set(re.findall(r"^ {4}(n\d+) ", box, re.MULTILINE)) for box in text.split("subgraph")[1:])
    edges = re.findall(r"(n\d+) -> (n\d+)", text)

    assert "from outside" not in text
    assert any(start in outside and end in layer for start, end in edges)  # the embedding
    assert any(start in layer and end in outside for start, end in edges)  # the last norm
    first = next(end for start, end in edges if start in outside and end in layer)
    assert any(start in layer and end == first for start, end in edges)  # layer 1 reads layer 0


MODELS = {
    "Llama": {},
    "Gemma2": {"head_dim": 16, "sliding_window": 4},
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "Bloom": {},
    "Mixtral": {"num_local_experts": 4},
    "Mamba": {},
}


@pytest.mark.parametrize("phase", ["prefill", "decode", "train"])
@pytest.mark.parametrize("name", MODELS)
def test_laws(name, phase):
    trace = record(build(name, **MODELS[name]), phase=phase, batch=2, context=8 if phase == "decode" else 0)
    result = ask(trace)
    totals, gemms = result.totals, rows(result)
    assert sum(row["flops"] for row in gemms) == totals["total_flops"]
    assert sum(row["bytes"] for row in gemms) == totals["gemm_bytes"]
    assert sum(row["share"] for row in gemms) == pytest.approx(1)
    inside, outside, total = (int(n.replace(",", "")) for n in re.findall(r"[\d,]*\d", result.notes[0]))
    assert inside + outside == total
    assert sum(row["params"] for row in gemms) == inside
    assert totals["engine_flops"] <= totals["total_flops"]
    assert totals["attention_flops_causal"] <= totals["attention_flops"]
    assert totals["weight_bytes_read_floor"] <= totals["weight_bytes_read"] <= totals["weight_bytes_read_ceiling"]
    assert 0 < totals["kernels_fused"] < totals["kernels"]
    assert not result.unclassified


def test_flops_are_linear_in_the_batch():
    one, three = (ask(record(build("Llama"), batch=batch)).totals for batch in (1, 3))
    for name in ("weight_flops", "attention_flops", "attention_flops_causal", "engine_flops", "kv_bytes_written"):
        assert three[name] == 3 * one[name]


def test_decode_is_the_last_token_of_a_prefill():
    model = build("Llama")
    decode = ask(record(model, phase="decode", context=8)).totals
    longer, shorter = (ask(record(model, seq=seq)).totals for seq in (9, 8))
    for name in ("weight_flops", "attention_flops_causal"):
        assert decode[name] == longer[name] - shorter[name]


def test_the_backward_has_both_directions():
    result = ask(record(build("Llama"), phase="train"))
    (forward,), (dx,), (dw,) = (
        rows(result, module="model.layers.*.mlp.gate_proj", direction=d) for d in ("forward", "dx", "dw")
    )
    assert (dx["m"], dx["k"], dx["n"]) == (8, 160, 64)
    assert dw["k"] == 8
    assert forward["flops"] == dx["flops"] == dw["flops"]


def test_a_scan_that_runs_step_by_step_is_said():
    trace = record(build("Mamba"), seq=2048)

    assert any("a scan is run step by step" in note for note in ask(trace).notes)
    assert not any("scan" in note for note in ask(record(build("Llama"))).notes)


def test_views_of_one_parameter_share_its_count():
    attention = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    queries, memory = torch.zeros(2, 10, 64), torch.zeros(2, 12, 64)
    result = introspect.analyze("trace", attention, (queries, memory, memory))

    packed = rows(result, module="in_proj_weight")
    assert [(row["n"], row["params"]) for row in packed] == [(64, 64 * 64), (128, 2 * 64 * 64)]
    assert sum(row["params"] for row in rows(result)) == 4 * 64 * 64
