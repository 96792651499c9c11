"""The commands there are: one for every file of analyzers/ whose name does not start with an underscore.

Looking for them imports none of them; asking for one imports that one. A command's file has

- a docstring: the first line is the help, the rest the formula, units, sources, limits;
- `MODELS`: "none", "one", "two" or "many" models as arguments; `EXAMPLES`, shown by --help;
- `Params`, a frozen dataclass of `option()` fields;
- `analyze(params, traces)` -> Result; `traces` is a tuple for two and many, which may return a tuple of results, and
  left out for none;
- where it draws, `FORMATS`, and a `format` field in Params that says which one is asked for;
- where it needs something measured with torch, `GATHER`, a module of hooks/ whose `gather`, called with the same
  arguments, gives `analyze`'s last one.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import introspect.analyzers
from introspect.errors import UnknownNameError

Models = Literal["none", "one", "two", "many"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """An analyzer as the command line and Python see it."""

    name: str
    doc: str
    models: Models
    examples: tuple[str, ...]
    formats: tuple[str, ...]  # drawings it makes besides the tables
    params: type
    gather: str | None
    analyze: Callable[..., Any]


def command_names() -> tuple[str, ...]:
    """All commands, sorted."""
    found = (module.name for module in pkgutil.iter_modules(introspect.analyzers.__path__))
    return tuple(sorted(name for name in found if not name.startswith("_")))


def command_help(name: str) -> str:
    """The one-line help of a command: the first line of its file's docstring, read without importing it."""
    for folder in introspect.analyzers.__path__:
        path = Path(folder, f"{name}.py")
        if path.is_file():
            with path.open(encoding="utf-8") as file:
                return file.readline().strip().strip('"')
    return ""


def load_command(name: str) -> Command:
    """Import one command. UnknownNameError names the near ones."""
    names = command_names()
    if name not in names:
        raise UnknownNameError("command", name, names)
    module = importlib.import_module(f"introspect.analyzers.{name}")
    return Command(
        name=name,
        doc=module.__doc__ or "",
        models=module.MODELS,
        examples=tuple(module.EXAMPLES),
        formats=tuple(getattr(module, "FORMATS", ())),
        params=module.Params,
        gather=getattr(module, "GATHER", None),
        analyze=module.analyze,
    )
