"""A model with one config field of another taken over."""

from __future__ import annotations

from dataclasses import dataclass

from introspect.records import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Substituted:
    """`parameters`: how many it has, tied ones once. `trace`: the run asked for; None where it does not run so."""

    parameters: int
    trace: Trace | None
