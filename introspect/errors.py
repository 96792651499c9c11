"""Every error a user can meet. One root class; each child carries its data as attributes and words its own message.

A message names the field or file, what was found, what was expected, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class IntrospectError(Exception):
    """Root of all errors this package raises on purpose. The command line prints it as one line and exits with 2."""


class OptionError(IntrospectError):
    """An option or argument outside its bounds: says which, what was given, what is allowed."""

    def __init__(self, option: str, value: object, expected: str) -> None:
        self.option = option
        self.value = value
        self.expected = expected
        super().__init__(f"{option}: got {value!r}, expected {expected}")


class TraceShapeError(IntrospectError):
    """A stored trace was asked about another run shape: it answers only for its own."""

    def __init__(self, stored: str, asked: str) -> None:
        self.stored = stored
        self.asked = asked
        super().__init__(
            f"this stored trace holds one run ({stored}) and cannot answer for another ({asked}); "
            "trace the model again with the shape you need"
        )


class TraceFormatError(IntrospectError):
    """A file that should hold a stored trace does not: damaged, or another schema version."""

    def __init__(self, source: str, problem: str) -> None:
        self.source = source
        self.problem = problem
        super().__init__(f"{source}: not a readable trace: {problem}; trace the model again")


class ModelRunError(IntrospectError):
    """The model was built but its forward (or backward) raised on the meta device."""

    def __init__(self, model: str, phase: str, problem: str, where: str) -> None:
        self.model = model
        self.phase = phase
        self.problem = problem
        self.where = where
        super().__init__(f"{model}: the {phase} run failed at {where}: {problem}")


class UnknownNameError(IntrospectError):
    """A command or option that does not exist: says which is meant when some are near. `kind` as "command"."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind = kind
        self.name = name
        self.nearest = tuple(get_close_matches(name, sorted(known), n=3))
        hint = f"did you mean {' or '.join(self.nearest)}?" if self.nearest else "see --help for those there are"
        super().__init__(f"unknown {kind} {name!r}; {hint}")


class FileAccessError(IntrospectError):
    """A file could not be read or written: says which and what the system answered."""

    def __init__(self, path: str, action: str, problem: str) -> None:
        self.path = path
        self.action = action
        self.problem = problem
        super().__init__(f"{path}: cannot {action} it: {problem}")
