"""Fail in a way nobody foresaw, or answer at once."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from threading import Event

from introspect.params import option
from introspect.table import Result

MODELS = "none"
EXAMPLES = ("introspect crash",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """How to fail."""

    model: str | None = option(None, "what it would fail on", positional=True)
    how: str = option("ZeroDivisionError", "name of the exception, wait, swallow, note or unreadable")


def analyze(params: Params) -> Result:
    """Raise what was asked for."""
    if params.how in ("note", "unreadable"):
        return Result(command="crash", notes=(str(params.model),), unreadable=params.how == "unreadable")
    if params.how == "wait":
        print("ready", flush=True)
        Event().wait()
    if params.how == "swallow":  # as a library does that is interrupted in its import
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("half imported") from None
    kinds = {kind.__name__: kind for kind in (ZeroDivisionError, KeyboardInterrupt, BrokenPipeError)}
    raise kinds[params.how]("first line\nsecond line")
