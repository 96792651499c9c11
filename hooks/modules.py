"""The stack of running modules, kept by a forward pre-hook and a forward hook on every module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(slots=True)
class Frame:
    """One running module call. `ops` counts what the call itself dispatched, its children's calls apart."""

    path: str
    ops: int = 0


class ModuleStack:
    """Knows which module runs. The root's path is "" and stays at the bottom, also for ops outside any call."""

    def __init__(self) -> None:
        self._frames = [Frame("")]

    @property
    def top(self) -> Frame:
        """The innermost running module call."""
        return self._frames[-1]

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Hook every module of `model`; all hooks are removed on exit, also after an error."""
        handles = []
        try:
            for path, module in model.named_modules():
                if path == "":
                    continue
                handles.append(module.register_forward_pre_hook(self._enter(path), prepend=True))
                handles.append(module.register_forward_hook(self._leave, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
            del self._frames[1:]

    @contextmanager
    def inside(self, path: str) -> Iterator[None]:
        """Count what runs as the module's own although no hook fires: a layer that is recomputed."""
        depth = len(self._frames)
        self._frames.append(Frame(path))
        try:
            yield
        finally:
            del self._frames[depth:]

    def _enter(self, path: str) -> Any:
        frames = self._frames

        def enter(module: nn.Module, args: Any) -> None:
            frames.append(Frame(path))

        return enter

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        # Returns None: a hook that returns anything else, even "", replaces the module's output.
        self._frames.pop()
