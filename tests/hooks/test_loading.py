"""What would load: the same verdict as transformers' own load of the same file, and more precise words."""

import json
import re
from pathlib import Path

import hypothesis
import pytest
import torch
import transformers
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.checkpoints import save_tiny

from introspect import analyze

MODELS = {
    "dense": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "biased": ("Qwen2", {}),
    "fused": ("Phi3", {"pad_token_id": 0}),
    "parallel": ("Falcon", {}),
    "moe": ("Mixtral", {"num_local_experts": 4}),
    "shared experts": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "latent": (
        "DeepseekV3",
        {
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
        },
    ),
    "turned experts": ("GptOss", {"num_local_experts": 4, "head_dim": 16}),
}
CHANGES = ("nothing", "drop", "rename", "extra", "transpose", "halve", "double", "drop many", "base names")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, tensors) of each model, made once."""
    made = {}

    def get(kind):
        if kind not in made:
            name, sizes = MODELS[kind]
            folder = save_tiny(tmp_path_factory.mktemp(name), name, **sizes)
            made[kind] = folder, load_file(folder / "model.safetensors")
        return made[kind]

    return get


def changed(state, change, name, every):
    """A copy of the tensors with one thing done to them."""
    state = dict(state)
    tensor = state[name]
    if change == "drop":
        del state[name]
    elif change == "rename":
        state[f"{name}_"] = state.pop(name)
    elif change == "extra":
        state["strange.weight"] = tensor.clone()
    elif change == "transpose":
        state[name] = tensor.movedim(0, -1).contiguous()
    elif change == "halve":
        state[name] = tensor[: tensor.shape[0] // 2].clone()
    elif change == "double":
        state[name] = torch.cat([tensor, tensor])
    elif change == "drop many":
        state = {n: t for place, (n, t) in enumerate(sorted(state.items())) if place % every}
    elif change == "base names":
        state = {n.removeprefix("model."): t for n, t in state.items() if not n.startswith("lm_head")}
    return state


def theirs(folder):
    """(complaint or not, parameters it would fill at random): transformers' own load."""
    settings = json.loads((folder / "config.json").read_text())
    model_class = getattr(transformers, settings["architectures"][0])
    transformers.utils.logging.set_verbosity_error()
    try:
        _, info = model_class.from_pretrained(folder, output_loading_info=True, ignore_mismatched_sizes=True)
    except RuntimeError:  # a conversion failed: the load is off
        return True, None
    filled = set(info["missing_keys"]) | {key for key, *_ in info["mismatched_keys"]}
    return any(info.values()), filled


def compare(kind, saved, change, pick, every):
    folder, state = saved(kind)
    names = sorted(state)
    save_file(changed(state, change, names[pick % len(names)], every), folder / "model.safetensors", {"format": "pt"})
    complains, filled = theirs(folder)

    result = analyze("check", str(folder))

    rows = result.tables["findings"].rows
    assert result.findings == complains
    lacking = [row for row in rows if row["kind"] in ("missing", "shape", "conversion")]
    assert bool(lacking) == (filled is None or bool(filled))
    if filled is not None and kind in ("dense", "tied", "biased", "fused", "parallel") and change != "base names":
        assert sum(row["count"] for row in lacking) == len(filled)  # names are the model's own: one for one
    save_file(state, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("kind", MODELS)
@hypothesis.settings(max_examples=12)
@hypothesis.given(change=st.sampled_from(CHANGES), pick=st.integers(0, 500), every=st.integers(2, 9))
def test_what_transformers_loads_without_complaint_is_clean_and_the_reverse(kind, saved, change, pick, every):
    compare(kind, saved, change, pick, every)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("change", CHANGES)
def test_every_role_changed_in_every_way(kind, saved, change):
    names = sorted(saved(kind)[1])
    roles = {re.sub(r"\d+", "*", name): place for place, name in enumerate(names)}  # the last of each
    picks = {"nothing": [0], "base names": [0], "drop many": range(8)}.get(change, roles.values())
    for pick in picks:
        compare(kind, saved, change, pick, 2 + pick % 8)


def check(folder: Path, *more, **options):
    result = analyze("check", str(folder), checkpoint=str(more[0]) if more else None, **options)
    return {row["kind"]: row for row in result.tables["findings"].rows}, result


def rewrite(folder, change):
    state = load_file(folder / "model.safetensors")
    state = change(state) or state
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def test_a_tied_head_that_is_not_stored_is_clean(tmp_path):
    folder = save_tiny(tmp_path / "m", "Llama", tie_word_embeddings=True)

    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert check(folder)[0] == {}


def test_a_tied_head_that_is_stored_too_is_a_note_with_its_bytes(tmp_path):
    folder = save_tiny(tmp_path / "m", "Llama", tie_word_embeddings=True)
    rewrite(folder, lambda s: s | {"lm_head.weight": s["model.embed_tokens.weight"].clone()})

    findings, result = check(folder)

    assert not result.findings
    assert findings["tied_stored"]["found"] == "65,536 bytes, the same data"  # 512 x 64 x 2
    assert findings["tied_stored"]["expected"] == "tied to model.embed_tokens.weight"


def test_a_tied_head_with_other_data_is_a_warning(tmp_path):
    folder = save_tiny(tmp_path / "m", "Llama", tie_word_embeddings=True)
    rewrite(folder, lambda s: s | {"lm_head.weight": s["model.embed_tokens.weight"] + 1})

    findings, result = check(folder)

    assert result.findings
    assert findings["tied_differs"]["tensor"] == "lm_head.weight"


def test_a_missing_expert_matrix_is_named(tmp_path):
    folder = save_tiny(tmp_path / "m", "Mixtral", num_local_experts=4)
    lost = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    rewrite(folder, lambda s: {n: t for n, t in s.items() if n != lost})

    findings, result = check(folder)

    assert (findings["missing"]["tensor"], findings["missing"]["expected"]) == (lost, "bf16 [64, 160]")
    assert result.totals["missing"] == 1


def test_one_expert_too_many_is_unexpected(tmp_path):
    folder = save_tiny(tmp_path / "m", "Mixtral", num_local_experts=4)
    rewrite(folder, lambda s: s | {n.replace("experts.3", "experts.4"): t.clone() for n, t in s.items()})

    _, result = check(folder)

    assert result.totals["unexpected"] == 6  # 2 layers x 3 matrices
    assert {row["tensor"] for row in result.tables["findings"].rows} == {
        f"model.layers.*.block_sparse_moe.experts.4.{name}.weight" for name in ("w1", "w2", "w3")
    }


def test_a_fused_matrix_that_lacks_is_one_tensor(tmp_path):
    folder = save_tiny(tmp_path / "m", "Phi3", pad_token_id=0)
    rewrite(folder, lambda s: {n: t for n, t in s.items() if "layers.0.self_attn.qkv_proj" not in n})

    findings, result = check(folder)

    assert findings["missing"]["tensor"] == "model.layers.0.self_attn.qkv_proj.weight"
    assert result.totals["missing"] == 1


def test_layers_are_folded_into_one_row(tmp_path):
    folder = save_tiny(tmp_path / "m", "Llama", num_hidden_layers=4)
    rewrite(folder, lambda s: {n: t for n, t in s.items() if "k_proj" not in n})

    findings, result = check(folder)

    row = findings["missing"]
    assert (row["tensor"], row["layers"], row["count"]) == ("model.layers.*.self_attn.k_proj.weight", "0-3", 4)
    assert len(result.tables["findings"].rows) == 1


def test_a_base_model_checkpoint_lacks_the_head(tmp_path):
    folder = save_tiny(tmp_path / "m", "Llama")
    rewrite(folder, lambda s: {n.removeprefix("model."): t for n, t in s.items() if n != "lm_head.weight"})

    findings, result = check(folder)

    assert result.totals["missing"] == 1
    assert findings["missing"]["cause"] == "no head (lm_head): a checkpoint of the base model or of another task"


def test_a_head_of_another_task(tmp_path):
    folder = save_tiny(tmp_path / "m", "Llama")
    rewrite(
        folder, lambda s: {n: t for n, t in s.items() if n != "lm_head.weight"} | {"score.weight": torch.ones(2, 64)}
    )

    findings, _ = check(folder)

    assert (findings["missing"]["tensor"], findings["unexpected"]["tensor"]) == ("lm_head.weight", "score.weight")


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_a_wrappers_prefix_is_recognised(prefix, tmp_path):
    folder = save_tiny(tmp_path / "m", "Llama")
    rewrite(folder, lambda s: {prefix + n: t for n, t in s.items()})

    findings, result = check(folder)

    assert findings["missing"]["cause"] == f"every name carries the prefix '{prefix}' that the model does not have"
    assert result.totals["missing"] == result.totals["unexpected"] == 21


@pytest.mark.parametrize(("stored", "asked"), [(2, 4), (4, 2)])
def test_another_number_of_layers(stored, asked, tmp_path):
    folder = save_tiny(tmp_path / "m", "Llama", num_hidden_layers=stored)
    settings = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": asked}
    (folder / "config.json").write_text(json.dumps(settings))

    findings, _ = check(folder)

    kind = "missing" if stored < asked else "unexpected"
    assert findings[kind]["cause"] == f"the checkpoint has {stored} layers, the config {asked}"
    assert findings[kind]["layers"] == "2-3"


def test_stored_rotary_buffers_are_ignored_and_said(tmp_path):
    folder = save_tiny(tmp_path / "m", "Llama")
    rewrite(
        folder,
        lambda s: s | {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(8) for n in range(2)},
    )

    findings, result = check(folder)

    assert not result.findings
    assert findings["ignored"]["layers"] == "0-1"
    assert findings["ignored"]["tensor"] == "model.layers.*.self_attn.rotary_emb.inv_freq"


def test_another_precision_than_the_config_says(tmp_path):
    folder = save_tiny(tmp_path / "m", "Llama")
    rewrite(folder, lambda s: {n: t.float() for n, t in s.items()})

    findings, result = check(folder)

    assert result.totals["dtype_mismatch"] == 21
    assert (findings["dtype"]["expected"], findings["dtype"]["found"]) == ("bf16", "fp32")
    assert result.findings


def test_a_config_without_a_dtype_makes_none_wrong_but_mixed_ones_are(tmp_path):
    folder = save_tiny(tmp_path / "m", "Llama", num_hidden_layers=3)
    settings = json.loads((folder / "config.json").read_text())
    settings.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(settings))
    rewrite(folder, lambda s: {n: t.half() for n, t in s.items()})
    assert check(folder)[0] == {}
    rewrite(folder, lambda s: {n: t.float() if "layers.1.mlp.up" in n else t for n, t in s.items()})

    findings, _ = check(folder)

    assert set(findings) == {"mixed_dtype"}
    assert findings["mixed_dtype"]["found"] == "fp32"


def test_integers_where_the_model_computes_are_an_error(tmp_path):
    folder = save_tiny(tmp_path / "m", "Llama")
    rewrite(folder, lambda s: s | {"model.norm.weight": torch.ones(64, dtype=torch.int64)})

    findings, _ = check(folder)

    assert (findings["dtype_kind"]["severity"], findings["dtype_kind"]["found"]) == ("error", "int64")


def test_a_parameter_kept_in_fp32_may_be_stored_like_the_others(tmp_path):
    name, sizes = MODELS["latent"]
    folder = save_tiny(tmp_path / "m", name, **sizes)

    assert check(folder)[0] == {}


@pytest.mark.parametrize(
    ("change", "tensor", "cause"),
    [
        (lambda t: t.T.contiguous(), "model.layers.0.mlp.up_proj.weight", "stored transposed"),
        (lambda t: torch.cat([t, t]), "model.layers.0.self_attn.k_proj.weight", "stored for all 4 query heads"),
        (lambda t: t[:16].clone(), "model.layers.0.self_attn.k_proj.weight", "1 heads of 16 where the config says 2"),
        (lambda t: t[:500].clone(), "lm_head.weight", "a vocabulary of 500 tokens where the config says 512"),
        (lambda t: t[:, :7].clone(), "model.layers.0.mlp.up_proj.weight", "made for another config"),
    ],
)
def test_wrong_shapes_have_causes(change, tensor, cause, tmp_path):
    folder = save_tiny(tmp_path / "m", "Llama")
    rewrite(folder, lambda s: s | {tensor: change(s[tensor])})

    findings, result = check(folder)

    assert result.totals["shape_mismatch"] == 1
    assert cause in findings["shape"]["cause"]
    assert findings["shape"]["remedy"]


def test_a_padded_vocabulary_is_recognised(tmp_path):
    folder = save_tiny(tmp_path / "m", "Llama", vocab_size=500)
    rewrite(folder, lambda s: {n: torch.cat([t, t[:12]]) if len(t) == 500 else t for n, t in s.items()})

    _, result = check(folder)

    assert [(row["tensor"], row["cause"]) for row in result.tables["findings"].rows] == [
        (name, "vocabulary padded from 500 to 512 rows, a multiple of 512")
        for name in ("lm_head.weight", "model.embed_tokens.weight")
    ]


def test_a_tensor_parallel_shard_is_recognised(tmp_path):
    folder = save_tiny(tmp_path / "m", "Llama")
    columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")

    def shard(state):
        cut = {n: t[: t.shape[0] // 2].clone() for n, t in state.items() if n.split(".")[-2] in columns}
        rows = {
            n: t[:, : t.shape[1] // 2].clone() for n, t in state.items() if n.split(".")[-2] in ("o_proj", "down_proj")
        }
        return state | cut | rows

    rewrite(folder, shard)

    _, result = check(folder)

    causes = {row["tensor"].split(".")[-2]: row["cause"] for row in result.tables["findings"].rows}
    assert causes["up_proj"] == "a tensor-parallel shard: one of 2, cut along dimension 0"
    assert causes["o_proj"] == "a tensor-parallel shard: one of 2, cut along dimension 1"


def test_a_plain_module_is_compared_by_its_state(tmp_path):
    (tmp_path / "net.py").write_text("import torch\n\n\ndef build():\n    return torch.nn.Linear(3, 5)\n")
    save_file({"weight": torch.ones(5, 4), "extra": torch.ones(1)}, tmp_path / "net.safetensors")

    findings, result = check(f"{tmp_path / 'net.py'}:build", tmp_path / "net.safetensors")

    assert (findings["missing"]["tensor"], findings["unexpected"]["tensor"]) == ("bias", "extra")
    assert (findings["shape"]["expected"], findings["shape"]["found"]) == ("[5, 3]", "[5, 4]")
    assert "the module's own state_dict" in result.notes[1]


def test_nothing_of_transformers_is_left_changed(tiny_llama):
    import os

    from transformers import core_model_loading

    before = (
        core_model_loading.deepcopy,
        core_model_loading.rename_source_key,
        os.environ.get("HF_DEACTIVATE_ASYNC_LOAD"),
    )
    check(tiny_llama)

    after = (
        core_model_loading.deepcopy,
        core_model_loading.rename_source_key,
        os.environ.get("HF_DEACTIVATE_ASYNC_LOAD"),
    )
    assert after == before
