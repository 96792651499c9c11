import json

import pytest
from support.sources import source_of

from introspect.errors import BuildError, UnknownArchitectureError
from introspect.hooks.build import build
from introspect.sources import resolve

CONFIG = {
    "model_type": "introspect_test_net",
    "architectures": ["NetForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_net.NetConfig", "AutoModelForCausalLM": "modeling_net.NetForCausalLM"},
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "vocab_size": 16,
    "torch_dtype": "float16",
}
CONFIGURATION = """
from transformers import PreTrainedConfig

class NetConfig(PreTrainedConfig):
    model_type = "introspect_test_net"
    hidden_size: int = 4
    num_hidden_layers: int = 1
    vocab_size: int = 16
"""
MODELING = """
from torch import nn
from transformers import PreTrainedModel
from .configuration_net import NetConfig

class NetForCausalLM(PreTrainedModel):
    config_class = NetConfig

    def __init__(self, config):
        super().__init__(config)
        width = config.hidden_size
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(config.num_hidden_layers))
        self.post_init()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    repository = tmp_path / "net"
    repository.mkdir()
    (repository / "config.json").write_text(json.dumps(CONFIG))
    (repository / "configuration_net.py").write_text(CONFIGURATION)
    (repository / "modeling_net.py").write_text(MODELING)
    return repository


def test_it_is_refused_unless_trusted(folder):
    with pytest.raises(UnknownArchitectureError, match="it, then pass --trust-remote-code"):
        build(resolve(str(folder)))


def test_trusted_code_is_built_and_said(folder):
    built = build(resolve(str(folder), trust_remote_code=True))
    assert built.identity.class_name == "NetForCausalLM"
    assert built.identity.notes == ("built with the repository's own code: modeling_net.NetForCausalLM",)
    assert len(built.module.layers) == 3
    assert (built.dtype, built.module.layers[0].weight.is_meta) == ("fp16", True)


def test_code_that_fails_to_import(folder):
    (folder / "modeling_net.py").write_text("import configuration_of_nobody\n")
    with pytest.raises(BuildError) as caught:
        build(resolve(str(folder), trust_remote_code=True))
    message = str(caught.value)
    assert "importing modeling_net.NetForCausalLM raised ImportError: " in message
    assert "configuration_of_nobody" in message
    assert message.endswith("; install what it needs, or use another revision of the code")
    assert "\n" not in message


def test_without_a_model_class_in_auto_map_the_choice_is_transformers_own(folder):
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    source = source_of(config | {"auto_map": {"AutoTokenizer": "t.T"}}, directory=folder, remote_code=True)
    assert build(source).identity.class_name == "LlamaForCausalLM"


def test_auto_map_without_a_config_class(folder):
    config = CONFIG | {"auto_map": {"AutoModel": "modeling_net.NetForCausalLM"}}
    with pytest.raises(BuildError, match="auto_map names no AutoConfig"):
        build(source_of(config, directory=folder, remote_code=True))
