"""Compare two models, one result for each."""

from __future__ import annotations

from dataclasses import dataclass

from introspect.params import RunParams, Traces
from introspect.table import Result, describe_model

MODELS = "many"
EXAMPLES = ("introspect pair A B",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(RunParams):
    """What to run."""


def analyze(params: Params, traces: tuple[Traces, ...]) -> tuple[Result, ...]:
    """The parameter total of each."""
    records = [one(params.run_shape()) for one in traces]
    return tuple(
        Result(
            command="pair",
            model=describe_model(trace),
            totals={"params": sum(parameter.count for parameter in trace.parameters)},
        )
        for trace in records
    )
