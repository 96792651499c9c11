"""What every command returns: totals, tables with a unit per column, and the assumptions behind them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from introspect.figures import Figure
from introspect.records import SCHEMA_VERSION, RunShape, Trace

Value = int | float | str | bool | None | list[Any]
VERSION = "0.1.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of named values. `units` names every column, in order, with its unit ("" for text and plain counts)."""

    units: dict[str, str]
    rows: tuple[dict[str, Value], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if row.keys() != self.units.keys():
                raise AssertionError(f"row has columns {list(row)}, the table declares {list(self.units)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The answer of one command for one model: CONTRACT.md's JSON as a value.

    `assumptions` are figures that were assumed (hardware peak, routing); `notes` are facts worth saying beside the
    tables; `findings` is True when the command found something wrong (exit code 1), `unreadable` when a part of its
    input could not be read, so that the answer has a gap (exit code 2).
    """

    command: str
    model: dict[str, Value] | None = None
    run: dict[str, Value] = field(default_factory=dict)
    totals: dict[str, Value] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unclassified: tuple[str, ...] = ()
    findings: bool = False
    unreadable: bool = False
    figure: Figure | None = None  # what --plot draws
    text: str | None = None  # a drawing or a record that replaces the tables on stdout

    def to_dict(self) -> dict[str, Any]:
        """The command's JSON, names as CONTRACT.md fixes them."""
        return {
            "introspect": VERSION,
            "schema": SCHEMA_VERSION,
            "command": self.command,
            "model": self.model,
            "run": self.run,
            "totals": self.totals,
            "tables": {
                name: {"units": table.units, "rows": [dict(row) for row in table.rows]}
                for name, table in self.tables.items()
            },
            "assumptions": list(self.assumptions),
            "notes": list(self.notes),
            "unclassified": list(self.unclassified),
        }


def describe_model(trace: Trace) -> dict[str, Value]:
    """The `model` entry of a result."""
    return {
        "id": trace.model.id,
        "class": trace.model.class_name,
        "source": trace.model.source,
        "config_sha256": trace.model.config_sha256,
    }


def describe_run(run: RunShape) -> dict[str, Value]:
    """The `run` entry of a result."""
    return {
        "phase": run.phase,
        "batch": run.batch,
        "seq": run.seq,
        "context": run.context,
        "dtype": run.dtype,
        "tp": run.tp,
        "ep": run.ep,
    }
