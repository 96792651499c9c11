"""Fail in a way nobody foresaw."""

from __future__ import annotations

from dataclasses import dataclass

from introspect.params import option
from introspect.table import Result

MODELS = "none"
EXAMPLES = ("introspect crash",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """How to fail."""

    how: str = option("ZeroDivisionError", "name of the exception")


def analyze(params: Params) -> Result:
    """Raise what was asked for."""
    kinds = {kind.__name__: kind for kind in (ZeroDivisionError, KeyboardInterrupt, BrokenPipeError)}
    raise kinds[params.how]("first line\nsecond line")
