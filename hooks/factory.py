"""Run a user's `file.py:factory`: any function that returns a module, or a module and example inputs.

The file is the user's own code and is imported as Python would run it: its folder first on the path. The factory runs
with tensors on the meta device, so a model of any size costs nothing; inputs whose values matter (ids, lengths) are
made with device="cpu".
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, cast

from accelerate import init_empty_weights
from torch import nn

from introspect.errors import BuildError

RETURNS = "a torch.nn.Module, or a tuple (module, example inputs)"


def run_factory(path: Path, factory: str) -> tuple[nn.Module, Any]:
    """The module `factory` of the Python file at `path` returns, on meta, and its example inputs (None: it gives none).

    Raises BuildError naming the line of the file that failed, or what the factory should be or return.
    """
    with _importable(path.parent):
        function = _load(path, factory)
        with _blaming(path, f"{factory}()"), init_empty_weights(include_buffers=True):
            result = function()
    module, inputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(module, nn.Module):
        raise BuildError(f"{path}:{factory}", f"it returned {_describe(result)}", f"return {RETURNS}")
    return module, inputs


def _load(path: Path, factory: str) -> Callable[[], Any]:
    name = f"introspect_factory_{path.stem}"
    spec = spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise BuildError(str(path), "Python cannot import it", "give a .py file")
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look their module up by name
    with _blaming(path, "the import"):
        spec.loader.exec_module(module)
    function = getattr(module, factory, None)
    if not callable(function):
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        found = f"it has no function {factory!r}" if function is None else f"{factory!r} is no function"
        raise BuildError(str(path), found, f"it has {', '.join(names) or 'none'}; write one that returns {RETURNS}")
    return cast("Callable[[], Any]", function)


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let the file import its neighbours, and forget them after: another folder may hold others of the same name."""
    place, before = str(folder.resolve()), set(sys.modules)
    sys.path.insert(0, place)
    try:
        yield
    finally:
        if place in sys.path:
            sys.path.remove(place)
        for name in set(sys.modules) - before:
            if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(place):
                del sys.modules[name]


@contextmanager
def _blaming(path: Path, what: str) -> Iterator[None]:
    """Turn whatever the user's code raises, sys.exit included, into one line that names its place in the file."""
    try:
        yield
    except (Exception, SystemExit) as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path.resolve()]
        place = f"{path}:{lines[-1]}" if lines else str(path)
        problem = f"{what} raised {type(error).__name__}: {' '.join(str(error).split())}"
        raise BuildError(place, problem, "correct the file") from error


def _describe(value: object) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(item).__name__ for item in value)}"
    return "None" if value is None else f"a value of type {type(value).__name__}"
