"""Imports point down, and heavy libraries stay where they belong."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = (
    # Each module may import its own layer and those above it in this list; hooks and analyzers stand beside each other.
    {"introspect.records", "introspect.units", "introspect.errors", "introspect.table", "introspect.params"},
    {"introspect.commands"},
    {"introspect.api"},
    {"introspect.cli", "introspect.completion", "introspect.__main__"},
)
TORCH = {"torch", "transformers", "accelerate", "fvcore", "safetensors"}
LATE = {"numpy", "matplotlib", "tabulate", "huggingface_hub"}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "introspect" else ("introspect", *parts)).removesuffix(".__init__")


FILES = {
    module_name(path): path
    for folder in ("introspect", "hooks", "analyzers")
    for path in sorted((ROOT / folder).glob("*.py"))
}


def imports(source, *, late):
    """Names of imported modules: those of the file's top level, or (late) all. Type-checking blocks do not run."""
    found = set()

    def visit(node):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif late or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for child in ast.iter_child_nodes(node):
                visit(child)

    visit(ast.parse(source))
    return found


def family(module):
    """hooks, analyzers, or introspect."""
    return module.split(".")[1] if module.startswith(("introspect.hooks", "introspect.analyzers")) else "introspect"


def layer(module):
    """Position in LAYERS; everything else of the package (loaders, renderers, hooks, analyzers) lies above records."""
    return next((index for index, names in enumerate(LAYERS) if module in names), None)


def violations(module, source):
    """What this file imports and must not."""
    top, everything = imports(source, late=False), imports(source, late=True)
    packages = {name.partition(".")[0] for name in top}
    found = set()
    if family(module) != "hooks":
        found |= {f"{name} at the top" for name in packages & (TORCH | LATE)}
    if family(module) == "analyzers":
        running = ("introspect.hooks", "introspect.traces")
        found |= {name for name in everything if name.partition(".")[0] in TORCH or name.startswith(running)}
    if family(module) == "hooks":
        found |= {name for name in everything if name.startswith("introspect.analyzers")}
    if family(module) != "hooks":
        found |= {f"{name} at the top" for name in top if name.startswith("introspect.hooks")}
    upper = {name: layer(name) for name in everything if layer(name) is not None}
    own = layer(module)
    own = 0.5 if own is None else own  # between records and commands
    if module != "introspect":
        found |= {name for name, index in upper.items() if index > own}
    return found


@pytest.mark.parametrize("module", FILES)
def test_imports_point_down(module):
    assert violations(module, FILES[module].read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize(
    ("module", "source", "violation"),
    [
        ("introspect.analyzers.kv", "import torch", "torch at the top"),
        ("introspect.analyzers.kv", "def f():\n    import torch", "torch"),
        ("introspect.analyzers.kv", "from introspect.hooks.build import build", "introspect.hooks.build"),
        ("introspect.hooks.build", "from introspect.analyzers import kv", "introspect.analyzers.kv"),
        ("introspect.render", "import tabulate", "tabulate at the top"),
        ("introspect.render", "from introspect.api import trace", "introspect.api"),
        ("introspect.analyzers.kv", "from introspect.traces import Live", "introspect.traces"),
        ("introspect.records", "from introspect.api import trace", "introspect.api"),
        ("introspect.traces", "from introspect.hooks.build import build", "introspect.hooks.build at the top"),
        ("introspect.api", "def f():\n    from introspect.cli import main", "introspect.cli"),
    ],
)
def test_this_test_can_fail(module, source, violation):
    assert violation in violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("introspect.traces", "def f():\n    from introspect.hooks.build import build"),
        ("introspect.hooks.build", "import torch"),
        ("introspect.hooks.audit", "from introspect.traces import Live"),
        ("introspect.figures", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import matplotlib"),
        ("introspect.cli", "from introspect.api import answer"),
    ],
)
def test_what_is_allowed(module, source):
    assert violations(module, source) == set()
