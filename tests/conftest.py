"""Fixtures for every test: no test reads or fills the user's own cache."""

import json
import os
from pathlib import Path

import hypothesis
import pytest

# No test asserts a time: a busy machine is no failure.
hypothesis.settings.register_profile("introspect", deadline=None)
hypothesis.settings.load_profile("introspect")


def pytest_addoption(parser):
    parser.addoption("--overwrite", action="store_true", help="rewrite golden files from what is printed now")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """One store of traces for the whole test run; processes started by tests inherit it."""
    before = os.environ.get("INTROSPECT_CACHE")
    os.environ["INTROSPECT_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["INTROSPECT_CACHE"]
    else:
        os.environ["INTROSPECT_CACHE"] = before


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory):
    """Path of a config: two layers of width 32, four query heads on two key heads, 50 tokens, bf16."""
    path = tmp_path_factory.mktemp("tiny") / "config.json"
    fields = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "vocab_size": 50,
        "dtype": "bfloat16",
    }
    path.write_text(json.dumps(fields), encoding="utf-8")
    return str(path)


@pytest.fixture
def golden(request):
    """Compare text with tests/golden/NAME; with --overwrite, write it there instead."""

    def compare(name, text):
        path = Path(__file__).parent / "golden" / name
        if request.config.getoption("--overwrite"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), f"differs from {path.name}; --overwrite if it should"

    return compare


@pytest.fixture
def demo_commands(monkeypatch):
    """The small commands of tests/support/commands beside the real ones."""
    import introspect.analyzers

    folder = str(Path(__file__).parent / "support" / "commands")
    monkeypatch.setattr(introspect.analyzers, "__path__", [*introspect.analyzers.__path__, folder])


@pytest.fixture
def tiny_llama(tmp_path):
    """A folder with the config and weights of a small Llama, as save_pretrained writes them."""
    from support.checkpoints import save_tiny

    return save_tiny(tmp_path / "tiny-llama", "Llama")
