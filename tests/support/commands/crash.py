"""Fail in a way nobody foresaw."""

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

    how: str = option("ZeroDivisionError", "name of the exception, wait or swallow")


def analyze(params: Params) -> Result:
    """Raise what was asked for."""
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
