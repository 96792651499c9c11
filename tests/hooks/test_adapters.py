"""Adapters against their base model, through peft's own injection."""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import save_tiny

from introspect import analyze
from introspect.errors import BuildError, CheckpointError, MissingPackageError

peft = pytest.importorskip("peft", reason="the extra `adapters` brings it")
LOST = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    import transformers

    folder = tmp_path_factory.mktemp("adapter")
    save_tiny(folder / "base", "Llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    peft.get_peft_model(model, settings).save_pretrained(folder / "adapter")
    return folder


@pytest.fixture
def adapter(made, tmp_path):
    shutil.copytree(made / "adapter", tmp_path / "adapter")
    return tmp_path / "adapter"


def check(*arguments, **options):
    names = [str(argument) for argument in arguments]
    result = analyze("check", names[0], checkpoint=names[1] if len(names) > 1 else None, **options)
    return {row["kind"]: row for row in result.tables["findings"].rows}, result


def rewrite(adapter, change):
    path = adapter / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)


def test_an_adapter_finds_its_base_and_is_clean(adapter):
    findings, result = check(adapter)

    assert (findings, result.findings) == ({}, False)
    assert result.totals["tensors"] == 9  # 2 layers x 2 modules x (A, B), and the saved head
    assert "compared by peft's injection" in result.notes[1]


def test_the_base_may_be_given(adapter, made):
    assert check(made / "base", adapter)[0] == {}
    assert check(made / "base", adapter / "adapter_model.safetensors")[0] == {}


def test_a_lost_matrix_is_named_as_the_file_would_name_it(adapter):
    rewrite(adapter, lambda state: {name: t for name, t in state.items() if name != LOST})

    findings, _ = check(adapter)

    assert (findings["missing"]["tensor"], findings["missing"]["expected"]) == (LOST, "fp32 [4, 64]")


def test_another_rank_is_a_wrong_shape(adapter):
    rewrite(adapter, lambda state: state | {LOST: torch.ones(8, 64)})

    findings, _ = check(adapter)

    assert (findings["shape"]["tensor"], findings["shape"]["expected"], findings["shape"]["found"]) == (
        LOST,
        "[4, 64]",
        "[8, 64]",
    )


def test_a_strange_tensor_is_unexpected(adapter):
    rewrite(adapter, lambda state: state | {"strange.lora_A.weight": torch.ones(1)})

    assert check(adapter)[0]["unexpected"]["tensor"] == "strange.lora_A.weight"


def test_a_base_of_another_architecture(adapter, tmp_path):
    save_tiny(tmp_path / "other", "Bloom")

    with pytest.raises(BuildError, match="peft cannot put this adapter into it"):
        check(tmp_path / "other", adapter)


def test_an_adapter_without_a_base_is_judged_alone(adapter):
    settings = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": None}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))

    _, result = check(adapter)

    assert result.model is None
    assert "an adapter without its base model" in result.notes[1]


def test_an_adapter_cannot_name_code_to_run(adapter, tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit('run')\n")
    base = f"{tmp_path / 'evil.py'}:build"
    settings = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": base}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))

    with pytest.raises(CheckpointError, match="an adapter whose base is code"):
        check(adapter)


def test_without_peft_the_extra_is_named(adapter, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)

    with pytest.raises(MissingPackageError, match=r"needs peft, .* pip install 'torch-introspect\[adapters\]'"):
        check(adapter)
