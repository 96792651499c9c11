import sys

import pytest
import torch

from introspect.errors import BuildError, OptionError
from introspect.hooks.build import build
from introspect.hooks.factory import run_factory
from introspect.sources import resolve

NET = """
from torch import nn, zeros, float32, long
from layers import WIDTH

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 10 * WIDTH)
        self.register_buffer("scale", zeros(WIDTH), persistent=False)

    def forward(self, x, ids=None):
        return self.up(x)

def build():
    return Net()

def with_inputs():
    return Net(), {"x": zeros(2, WIDTH), "ids": zeros(2, dtype=long, device="cpu")}

def with_a_tensor():
    return Net(), zeros(2, WIDTH)

def with_a_number():
    return Net(), 3

def on_cpu():
    return nn.Linear(4, 4, device="cpu")
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "layers.py").write_text("WIDTH = 1_000_000\n")
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def refusal(path, factory="build"):
    with pytest.raises(BuildError) as caught:
        run_factory(path, factory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_module_of_any_size_is_built_on_meta(folder):
    module, inputs = run_factory(folder / "net.py", "build")
    assert inputs is None
    assert module.up.weight.shape == (10_000_000, 1_000_000)
    assert all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def test_example_inputs_keep_values_only_where_a_device_is_named(folder):
    _, inputs = run_factory(folder / "net.py", "with_inputs")
    assert inputs["x"].is_meta
    assert inputs["ids"].device.type == "cpu"


def test_nothing_of_the_import_is_left_behind(folder, tmp_path_factory):
    path, modules = list(sys.path), set(sys.modules)
    run_factory(folder / "net.py", "build")
    assert sys.path == path
    assert set(sys.modules) - modules == set()
    other = tmp_path_factory.mktemp("other")
    (other / "layers.py").write_text("WIDTH = 3\n")
    (other / "net.py").write_text(NET)
    assert run_factory(other / "net.py", "build")[0].up.in_features == 3


def test_the_built_model_carries_inputs_and_where_it_came_from(folder):
    built = build(resolve(f"{folder / 'net.py'}:with_inputs"))
    assert built.identity.id == f"{folder / 'net.py'}:with_inputs"
    assert built.identity.class_name == "Net"
    assert built.identity.source == f"factory with_inputs of {folder / 'net.py'}"
    assert built.inputs.keys() == {"x", "ids"}
    assert (built.config, built.identity.config, built.dtype) == (None, {}, "fp32")
    assert not built.module.training


def test_a_dtype_asked_for_and_inputs_of_the_caller(folder):
    given = {"x": torch.zeros(1), "ids": torch.zeros(1, dtype=torch.long)}
    built = build(resolve(f"{folder / 'net.py'}:with_inputs"), dtype="fp16", inputs=given)
    assert built.module.up.weight.dtype == torch.float16
    assert {name: value.dtype for name, value in built.inputs.items()} == {"x": torch.float16, "ids": torch.long}


def test_inputs_of_a_factory_in_any_form(folder):
    assert build(resolve(f"{folder / 'net.py'}:with_a_tensor")).inputs.keys() == {"x"}
    with pytest.raises(OptionError, match="inputs: got 'int', expected a dict of forward's arguments"):
        build(resolve(f"{folder / 'net.py'}:with_a_number"))


def test_a_module_that_named_a_device_is_moved_to_meta(folder):
    built = build(resolve(f"{folder / 'net.py'}:on_cpu"))
    assert built.module.weight.is_meta


@pytest.mark.parametrize(
    ("code", "line", "problem"),
    [
        ("import nothing_of_that_name", 1, "the import raised ModuleNotFoundError: No module named"),
        ("a = 1\nb = 1 / 0", 2, "the import raised ZeroDivisionError: division by zero"),
        ("raise SystemExit('stop')", 1, "the import raised SystemExit: stop"),
        ("def build():\n    x = 1\n    raise ValueError('two\\nlines')", 3, "build() raised ValueError: two lines"),
    ],
)
def test_the_users_own_errors_name_their_line(tmp_path, code, line, problem):
    path = tmp_path / "net.py"
    path.write_text(code)
    assert refusal(path).startswith(f"{path}:{line}: cannot build the model: {problem}")


def test_a_syntax_error(tmp_path):
    path = tmp_path / "net.py"
    path.write_text("def build(:\n")
    assert "the import raised SyntaxError: invalid syntax" in refusal(path)


def test_a_factory_that_needs_arguments(tmp_path):
    path = tmp_path / "net.py"
    path.write_text("def build(width): ...\n")
    assert "build() missing 1 required positional argument: 'width'" in refusal(path)


def test_a_name_that_is_no_factory(tmp_path):
    path = tmp_path / "net.py"
    path.write_text("build = 3\ndef other(): ...\n")
    assert "'build' is no function; it has other; write one that returns a torch.nn.Module" in refusal(path)
    assert "it has no function 'nothing'" in refusal(path, "nothing")


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        ("None", "None"),
        ("3", "a value of type int"),
        ("(1, 2, 3)", "a tuple of int, int, int"),
        ("({}, {})", "a tuple of dict, dict"),
    ],
)
def test_what_a_factory_must_return(tmp_path, returned, found):
    path = tmp_path / "net.py"
    path.write_text(f"def build():\n    return {returned}\n")
    assert refusal(path) == (
        f"{path}:build: cannot build the model: it returned {found}; "
        "return a torch.nn.Module, or a tuple (module, example inputs)"
    )
