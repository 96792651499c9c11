"""Real checkpoint indexes against the configs beside them: clean, or wrong for a reason that is written here."""

from pathlib import Path

import pytest

from introspect import analyze
from introspect.errors import UnknownArchitectureError

INDEXES = Path(__file__).parents[3] / "shared" / "models" / "indexes"
pytestmark = pytest.mark.skipif(not INDEXES.is_dir(), reason="the real indexes lie beside the repository, not in it")

CLEAN = (
    "HuggingFaceTB--SmolLM3-3B",
    "Qwen--Qwen2.5-3B",  # tied head, not stored
    "Qwen--Qwen3-1.7B",  # tied head, stored all the same
    "Qwen--Qwen3.5-9B",  # vision tower; 15 MTP tensors that the class ignores
    "community--Gemma3ForCausalLM-plain-1",
    "community--LlamaForCausalLM-bitsandbytes-1",
    "community--LlamaForCausalLM-plain-1",
    "community--M2M100ForConditionalGeneration-plain-1",
    "community--MistralForCausalLM-plain-1",
    "community--MistralForCausalLM-plain-2",
    "community--MixtralForCausalLM-plain-1",
    "community--Qwen3ForCausalLM-plain-1",
    "community--Qwen3_5MoeForConditionalGeneration-plain-1",  # the text part alone, per-expert names
    "community--Qwen3_5MoeForConditionalGeneration-plain-2",
    "google--gemma-2-2b-it",
    "google--medgemma-27b-it",  # 437 names of an older layout
    "microsoft--Phi-3-mini-4k-instruct",
    "mistralai--Mixtral-8x7B-v0.1",
    "tiiuae--falcon-180B-chat",
)
EXPLAINED = {  # a part of the cause that every finding names
    "community--LlavaNextVideoForConditionalGeneration-bitsandbytes-1": "saved from a model wrapped by PEFT",
    "community--Mistral3ForConditionalGeneration-plain-1": "a checkpoint in MLX parts",
    "community--Qwen3_5ForConditionalGeneration-plain-1": "a checkpoint in MLX parts",
}
WITHOUT_A_CLASS = (
    "MiniMaxAI--MiniMax-M1-80k",
    "Qwen--Qwen-7B",
    "Qwen--Qwen-VL-Chat-Int4",
    "community--ChatGLMForConditionalGeneration-plain-1",
    "community--ChatGLMModel-plain-1",
    "community--GPTNeoXRewardModel-plain-1",
    "community--MiniCPMV-plain-1",
    "community--MiniMaxM1ForCausalLM-plain-1",
    "community--MolmoForCausalLM-bitsandbytes-1",
    "community--QWenLMHeadModel-plain-1",
    "openPangu--openPangu-Embedded-7B",
    "openbmb--MiniCPM-V-2",
)
SIZE_UNKNOWN = {  # indexes with tensors whose sizes only their headers know
    "Qwen--Qwen3.5-9B",
    "community--LlamaForCausalLM-bitsandbytes-1",
}


def check(name):
    index = INDEXES / f"{name}.model.safetensors.index.json"
    return analyze("check", str(INDEXES / f"{name}.config.json"), checkpoint=str(index))


def totals():
    rows = (INDEXES / "INDEXES.tsv").read_text(encoding="utf-8").splitlines()[1:]
    return {row.split("\t")[0].removesuffix(".model.safetensors.index.json"): row.split("\t")[1:3] for row in rows}


def test_every_index_is_in_this_table():
    assert sorted(totals()) == sorted([*CLEAN, *EXPLAINED, *WITHOUT_A_CLASS])


@pytest.mark.parametrize("name", CLEAN)
def test_no_name_is_missing_or_unexpected_and_the_bytes_are_the_total(name):
    result = check(name)

    size, tensors = totals()[name]
    assert (result.totals["missing"], result.totals["unexpected"], result.findings) == (0, 0, False)
    assert (result.totals["bytes"], result.totals["tensors"]) == (int(size), int(tensors))
    compared = not any("total_size was not compared" in note for note in result.notes)
    assert compared == (name not in SIZE_UNKNOWN)  # compared: the model's own shapes and dtypes sum to total_size


@pytest.mark.parametrize("name", EXPLAINED)
def test_what_does_not_load_has_a_true_cause(name):
    result = check(name)

    causes = {row["cause"] for row in result.tables["findings"].rows if row["kind"] in ("missing", "unexpected")}
    assert result.findings
    assert all(EXPLAINED[name] in cause for cause in causes)


@pytest.mark.parametrize("name", WITHOUT_A_CLASS)
def test_a_model_that_transformers_does_not_have_is_refused(name):
    with pytest.raises(UnknownArchitectureError):
        check(name)
