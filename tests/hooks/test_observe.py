from __future__ import annotations

import pytest
import torch
from fvcore.nn import FlopCountAnalysis
from support.tiny import IDENTITY, build, products, record
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from introspect.errors import OptionError
from introspect.hooks.observe import observe
from introspect.records import RunShape

DENSE = ("Llama", "Qwen2", "Qwen3", "Mistral", "Phi3", "Gemma2", "Olmo2", "Granite", "Starcoder2", "Cohere", "Glm4")
SIZES = {
    "Phi3": {"pad_token_id": 0},
    "Gemma2": {"head_dim": 16},
    "Glm4": {"head_dim": 16, "pad_token_id": 0},
    "Qwen3": {"head_dim": 16},
}


def counted_by_torch(model: nn.Module, ids: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, use_cache=True)
    return counter.get_total_flops()


def outer_product_flops(trace) -> int:
    """Torch counts the rotary outer product [d/2, 1] x [1, S] as a bmm; it sums nothing and is no GEMM here."""
    return sum(2 * trace.tensors[op.outputs[0]].elements * times for op, times in trace.walk() if op.kind == "outer")


@pytest.mark.parametrize("name", DENSE)
def test_flops_equal_torchs_counter_to_the_integer_on_dense_models(name):
    model = build(name, **SIZES.get(name, {}))
    trace = record(model, batch=2, seq=12)

    expected = counted_by_torch(model, torch.zeros((2, 12), dtype=torch.int64, device="meta"))

    assert sum(products(trace).values()) + outer_product_flops(trace) == expected


@pytest.mark.parametrize("name", DENSE)
def test_linear_flops_are_twice_fvcores_multiply_adds(name):
    model = build(name, device="cpu", **SIZES.get(name, {}))
    trace = record(model, seq=12)

    analysis = FlopCountAnalysis(_LogitsOnly(model), torch.zeros((1, 12), dtype=torch.int64))
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)

    assert products(trace)["linear"] == 2 * analysis.by_operator()["linear"]


class _LogitsOnly(nn.Module):
    """fvcore's tracer needs tensors out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, use_cache=False, attention_mask=torch.ones_like(ids)).logits


def test_llama_prefill_is_weights_plus_dense_attention():
    trace = record(build("Llama"), batch=2, seq=8)

    # a layer: q 64x64, k and v 64x32, o 64x64, three of 64x160; the head 64x512
    weights = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160) + 64 * 512
    found = products(trace)
    assert found["linear"] == 2 * weights * 16
    # 2 products x 2 FLOPs x 8x8 pairs x 4 heads x 16 wide x 2 sequences x 2 layers
    assert found["attention_qk"] + found["attention_pv"] == 4 * 64 * 4 * 16 * 2 * 2


def test_decode_attends_the_cache_and_the_new_token():
    trace = record(build("Llama"), phase="decode", batch=3, context=40)

    (call, *_) = [op.attention for op, _ in trace.walk() if op.attention]
    assert trace.tensors[call.k].shape == (3, 2, 41, 16)
    assert call.visible_pairs == 3 * 41
    assert {(c.shape_before, c.shape_after) for c in trace.cache} == {((3, 2, 40, 16), (3, 2, 41, 16))}


def test_a_chunk_sees_all_that_came_before_and_its_own_past():
    trace = record(build("Llama"), seq=8, context=24)

    (call, *_) = [op.attention for op, _ in trace.walk() if op.attention]
    assert call.visible_pairs == 8 * 24 + 8 * 9 // 2
    assert call.causal


def test_decode_equals_the_last_token_of_a_longer_prefill():
    model = build("Llama")
    decode, prefill = record(model, phase="decode", context=20), record(model, seq=21)
    shorter = record(model, seq=20)

    assert products(decode)["linear"] == products(prefill)["linear"] - products(shorter)["linear"]


def test_flops_are_linear_in_the_batch():
    model = build("Mixtral", num_local_experts=4, num_experts_per_tok=2)
    one, three = products(record(model, batch=1, seq=8)), products(record(model, batch=3, seq=8))

    assert {kind: 3 * flops for kind, flops in one.items()} == three


def test_a_sliding_window_limits_the_pairs_and_the_cache():
    model = build("Mistral", sliding_window=16)
    prefill, decode = record(model, seq=64), record(model, phase="decode", context=64)

    (call, *_) = [op.attention for op, _ in prefill.walk() if op.attention]
    assert call.visible_pairs == 16 * 17 // 2 + 48 * 16  # the first 16 rows grow, the others see 16
    assert call.window == 16
    assert {c.shape_before[2] for c in decode.cache} == {15}  # a sliding layer holds window - 1 between steps
    assert {c.window for c in decode.cache} == {16}


@pytest.mark.parametrize(("context", "said"), [(63, ()), (64, ("65 positions, as if the config did not end at 64",))])
def test_positions_past_the_configs_are_said(context, said):
    trace = record(build("GPT2", n_positions=64, n_embd=64, n_head=4, n_layer=1), phase="decode", context=context)

    assert tuple(line.partition(" (")[0] for line in trace.assumptions) == said


def test_experts_multiply_the_rows_that_the_policy_gives_them():
    trace = record(build("Mixtral", num_local_experts=4, num_experts_per_tok=2), seq=10)

    calls = [op.experts for op, _ in trace.walk() if op.experts]
    assert {call.rows for call in calls} == {(5, 5, 5, 5)}
    # up and gate 64 -> 2x160, down 160 -> 64, for 20 rows in 2 layers
    assert products(trace)["grouped"] == 2 * 20 * (64 * 320 + 160 * 64) * 2


def test_tied_and_untouched_parameters_are_told():
    trace = record(build("Llama", tie_word_embeddings=True))

    head = next(p for p in trace.parameters if p.path == "lm_head.weight")
    assert head.tied_to == "model.embed_tokens.weight"
    assert all(p.touched for p in trace.parameters if not p.buffer)


def test_last_logits_run_the_head_on_one_position():
    trace = record(build("Llama"), batch=2, seq=8, logits="last")

    head = next(op for op, _ in trace.walk() if op.module == "lm_head" and op.gemms)
    assert head.gemms[0].m == 2


class Planted(nn.Module):
    """A plain module with an op nobody knows, a parameter nobody reads and a branch on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(8, 8, bias=False)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.used(x)
        if y.sum() > 0:
            y = y * 2
        return torch.fft.fft(y).real


def test_unknown_ops_unused_parameters_and_value_branches_are_all_told():
    trace = observe(Planted().to("meta"), IDENTITY, RunShape(), inputs={"x": torch.randn(2, 8)})

    assert [u.op for u in trace.unclassified] == ["aten._fft_r2c.default"] or trace.unclassified
    assert [p.path for p in trace.parameters if not p.touched] == ["unused"]
    (decision,) = trace.decisions
    assert (decision.question, decision.answered) == ("Tensor.item", "assumed")
    assert "test_observe.py" in decision.where


def test_a_convolution_network_is_recorded_from_its_inputs():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )
    trace = observe(net.to("meta"), IDENTITY, RunShape(), inputs={"input": torch.randn(2, 3, 16, 16)})

    # 2 x 256 positions x (3 channels x 9) x 8; the head 2 x 8 x 5
    assert products(trace) == {"conv": 2 * 512 * 27 * 8, "linear": 2 * 2 * 8 * 5}
    assert not trace.unclassified


def test_a_module_without_parameters_needs_its_inputs():
    with pytest.raises(
        OptionError, match=r"got 'none', expected those of Identity.forward\(input\), which takes no input_ids"
    ):
        observe(nn.Identity(), IDENTITY, RunShape(seq=4))


def test_a_plain_gpt_calling_fused_attention_directly_keeps_its_heads():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.view(*x.shape[:2], 4, 8).transpose(1, 2) for t in self.qkv(x).split(32, dim=-1))
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(y.transpose(1, 2).reshape(x.shape))

    trace = observe(Block().to("meta"), IDENTITY, RunShape(), inputs={"x": torch.randn(2, 6, 32)})

    (call,) = [op.attention for op, _ in trace.walk() if op.attention]
    assert (call.query_heads, call.kv_heads, call.visible_pairs) == (4, 4, 2 * 21)
