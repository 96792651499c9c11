"""Count the products of a model: 100 % of them.

One option of every kind, for the tests of the command line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from introspect.params import RunParams, Traces, option
from introspect.table import Result, Table, describe_model, describe_run

MODELS = "one"
EXAMPLES = ("introspect demo meta-llama/Meta-Llama-3-8B --phase decode",)
FORMATS = ("drawing",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(RunParams):
    """One of each kind."""

    format: str = option("table", "form of the output")
    share: float = option(0.5, "a share, 50 % by default", above=0, at_most=1)
    keep: tuple[str, ...] = option((), "what to keep, repeatable", metavar="PATTERN")
    sizes: tuple[int, ...] = option((1,), "sizes, repeatable")
    mode: Literal["fast", "slow"] = option("fast", "how")
    loud: bool = option(False, "say more")
    fail: bool = option(False, "find something wrong")
    note: str | None = option(None, "a note", positional=True)


def analyze(params: Params, traces: Traces) -> Result:
    """Totals and one table, and what the options were."""
    trace = traces(params.run_shape())
    if params.format == "drawing":
        return Result(command="demo", text="a -> b")
    rows = [(op, times, gemm) for op, times in trace.walk() for gemm in op.gemms]
    return Result(
        command="demo",
        model=describe_model(trace),
        run=describe_run(trace.run),
        totals={"total_flops": sum(times * gemm.flops for _, times, gemm in rows), "products": len(rows)},
        tables={
            "gemms": Table(
                units={"module": "", "shape": "", "flops": "FLOP", "share": "share", "group": ""},
                rows=tuple(
                    {
                        "module": op.module,
                        "shape": [gemm.m, gemm.k, gemm.n],
                        "flops": gemm.flops,
                        "share": params.share,
                        "group": None,
                    }
                    for op, _, gemm in rows
                ),
            )
        },
        assumptions=(f"mode {params.mode}", *params.keep, *map(str, params.sizes)),
        notes=(params.note,) if params.note else (),
        unclassified=("aten.odd x 3",) if params.loud else (),
        findings=params.fail,
    )
