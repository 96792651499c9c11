from __future__ import annotations

import json

import pytest
from support.tiny import LLAMA

import introspect

TINY = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", **LLAMA}


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def rows(result, table, **wanted):
    return [row for row in result.tables[table].rows if all(row[name] == value for name, value in wanted.items())]


def test_a_clean_model_has_no_findings_and_every_route_agrees(tiny):
    result = introspect.analyze("audit", tiny, seq=32)

    assert not result.findings
    assert set(result.totals.values()) == {0}
    assert result.notes[-1] == "nothing makes a number doubtful" or "nothing makes" in " ".join(result.notes)
    assert {row["agrees"] for row in result.tables["routes"].rows} == {True}
    assert {row["route"] for row in result.tables["routes"].rows} == {"torch", "fvcore", "twin"}


def test_hand_formulas_are_the_sums_everyone_writes(tiny):
    result = introspect.analyze("audit", tiny, seq=32, no_routes=True)

    # 2 layers: attention 2 x (64x64 + 64x32), FFN 3 x 64x160, two norms; embedding and head 512 x 64, a norm
    total = 2 * (2 * (64 * 64 + 64 * 32) + 3 * 64 * 160 + 2 * 64) + 2 * 512 * 64 + 64
    expected = {
        "mha": total + 2 * 2 * 64 * 32,  # K and V as wide as Q
        "tied": total - 512 * 64,
        "untied": total,
        "two_matrix_ffn": total - 2 * 64 * 160,
        "ffn_4d": total + 2 * 3 * 64 * (256 - 160),
        "head_dim": total,
        "q_by_kv_heads": total - 2 * 64 * 32,
    }
    assert {r["rule"]: r["hand"] for r in rows(result, "hand_formulas", quantity="parameters")} == expected
    assert {row["record"] for row in rows(result, "hand_formulas", quantity="parameters")} == {total}
    (flops,) = rows(result, "hand_formulas", rule="2n_per_token")
    assert flops["hand"] == 2 * total
    assert flops["record"] == 2 * (total - 512 * 64 - 5 * 64)  # no product: the embedding and five norms
    kv = {row["rule"]: row["hand"] for row in rows(result, "hand_formulas", quantity="kv_bytes_per_token")}
    assert kv == {
        "mha": 512,
        "head_dim": 256,
        "kv_expanded": 256,
        "all_layers_full": 256,
    }  # 2 layers x 2 x 2 x 16 x 2 B
    assert {row["context"] for row in rows(result, "hand_formulas", quantity="kv_bytes_per_token")} == {0}


def audited(tmp_path, **fields):
    """hand_formulas of a small config by (rule, quantity), and the notes."""
    options = fields.pop("options", {})
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, **fields}))
    result = introspect.analyze("audit", str(path), no_routes=True, **{"seq": 32, **options})
    return {(r["rule"], r["quantity"]): r for r in result.tables["hand_formulas"].rows}, result.notes


MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8}
GEMMA = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "sliding_window": 8, "head_dim": 16}


@pytest.mark.parametrize(
    ("options", "context", "record"),
    [
        ({}, 8, 128),  # where every window is full: one of two layers keeps 2 x 2 x 16 x 2 B more
        ({"phase": "decode", "context": 4}, 4, 256),
        ({"phase": "decode", "context": 64}, 64, 128),
        ({"context": 0}, 0, 256),
    ],
)
def test_a_window_is_compared_at_the_context_asked_or_full(tmp_path, options, context, record):
    table, _ = audited(tmp_path, **GEMMA, options=options)
    row = table["all_layers_full", "kv_bytes_per_token"]

    assert (row["context"], row["record"], row["hand"]) == (context, record, 256)
    assert row["relative_error"] == 256 / record - 1
    grown = introspect.analyze("kv", str(tmp_path / "config.json"), context=context).totals["bytes_per_token"]
    assert grown == record


def test_a_cache_of_windows_alone_grows_no_more(tmp_path):
    table, _ = audited(tmp_path, **MISTRAL)

    row = table["all_layers_full", "kv_bytes_per_token"]
    assert (row["hand"], row["record"], row["relative_error"]) == (256, 0, None)
    row = table["mha", "kv_bytes_per_token"]  # widths are compared where every layer still grows
    assert (row["hand"], row["record"], row["context"]) == (512, 256, 0)


def test_experts_are_held_against_an_engine_and_not_against_an_implementation(tmp_path):
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 160, "head_dim": 16}
    table, notes = audited(tmp_path, model_type="llama4_text", architectures=["Llama4ForCausalLM"], **sizes)

    row = table["all_experts", "flops_per_token"]
    one = 2 * 2 * 3 * 64 * 160  # FLOPs of one expert in each of 2 layers
    assert row["hand"] - row["record"] == 3 * one
    assert notes[-1].startswith("hand_formulas: an engine multiplies weights for ")


def test_a_hybrid_counts_its_own_cache_and_its_own_experts(tmp_path):
    # 4 layers: attention in the second, the rest Mamba with a state in fp32; experts in the second and fourth
    sizes = {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 1, "num_experts": 4}
    sizes |= {"expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4}
    table, _ = audited(tmp_path, model_type="jamba", architectures=["JambaForCausalLM"], **sizes)
    hand = {key: row["hand"] for key, row in table.items()}
    total = table["mha", "parameters"]["record"]

    assert table["mha", "kv_bytes_per_token"]["record"] == 2 * 2 * 16 * 2
    assert hand["mha", "kv_bytes_per_token"] == 2 * 4 * 16 * 2
    assert hand["all_layers_full", "kv_bytes_per_token"] == 4 * 2 * 2 * 16 * 2
    assert hand["head_dim", "parameters"] == total  # 64 / 4 = 16
    assert hand["two_matrix_ffn", "parameters"] == total - (2 + 2 * 4) * 64 * 160  # two dense FFNs, 2 x 4 experts


def test_precision_and_position_come_from_the_graph(tiny):
    result = introspect.analyze("audit", tiny, seq=32, no_routes=True)

    assert rows(result, "precision", op="norm") == [{"op": "norm", "compute_dtype": "fp32", "count": 5}]
    assert rows(result, "position") == [{"encoding": "rope", "layers": "0-1"}]


FACTORY = """
import torch
from torch import nn

class Planted(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(8, 8, bias=False)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        y = self.used(x)
        if y.sum() > 0:
            y = y * 2
        return torch.fft.fft(y).real

def build():
    return Planted(), {"x": torch.zeros(2, 8)}
"""


def test_planted_faults_are_all_reported(tmp_path):
    (tmp_path / "planted.py").write_text(FACTORY)
    result = introspect.analyze("audit", f"{tmp_path / 'planted.py'}:build")

    assert result.findings
    assert (result.totals["unused"], result.totals["decisions"]) == (3, 1)
    assert result.totals["unclassified"] >= 1
    said = " ".join(result.notes)
    assert "aten._fft_r2c.default in the root module has no cost rule" in said
    assert "planted.py:13 asked Tensor.item of a value that depends on weights; False was assumed" in said
    assert rows(result, "unused_parameters") == [{"parameter": "unused", "params": 3}]


def test_experts_that_torchs_counter_misses_are_said_to_be_missed(tmp_path):
    path = tmp_path / "config.json"
    sizes = {**TINY, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    path.write_text(json.dumps(sizes))

    result = introspect.analyze("audit", str(path), seq=16)

    (grouped,) = rows(result, "routes", route="torch", kind="grouped")
    assert grouped["agrees"] is None
    assert "aten._grouped_mm" in grouped["note"]
    assert grouped["ours"] == 16 * 2 * 2 * (64 * 320 + 160 * 64) * 2  # tokens x top-2 x layers x matrices x 2 FLOPs
    assert not result.findings


PLAIN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, idx, targets=None):
        return self.head(self.table(idx)), None

def build():
    return Net(), {"idx": torch.zeros((2, 6), dtype=torch.long, device="cpu")}
"""


def test_routes_of_a_plain_module_run_on_its_inputs(tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN)
    result = introspect.analyze("audit", f"{tmp_path / 'plain.py'}:build")

    head = 2 * 12 * 8 * 50
    assert (result.run["batch"], result.run["seq"]) == (2, 6)
    for route in ("torch", "fvcore"):
        assert [(r["ours"], r["theirs"], r["agrees"]) for r in rows(result, "routes", route=route)] == [
            (head, head, True)
        ]
    assert not result.findings
    assert result.notes == (
        "nothing makes a number doubtful",
        "second route twin did not run: a plain module has no config to be shrunk by",
    )


def test_a_stored_trace_is_audited_by_what_it_holds(tiny):
    result = introspect.analyze("audit", introspect.trace(tiny, seq=32))

    assert not result.findings
    assert result.tables["routes"].rows == ()
    assert result.notes[:3] == (
        "nothing makes a number doubtful",
        "no second route ran: a stored trace has no module to run",
        "no decode step was looked at: this prefill step is all there is",
    )
