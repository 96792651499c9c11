"""The stored formats of several models' checkpoints (see native_format.py)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from introspect.hooks import native_format
from introspect.native_record import NativeFormat
from introspect.traces import Live, Stored


def gather(params: Any, opened: Iterable[Stored | Live]) -> tuple[NativeFormat | None, ...]:
    """One for each model; None where nothing says that it is quantised."""
    return tuple(native_format.gather(params, one) for one in opened)
