"""Run one architecture after another, each in its own process: trace both phases, run its twin, note what happened.

A crash, a hang or a memory fault of one type is that type's row and nobody else's. Rows are appended to a file as they
come, and types that the file has already are not run again.
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path

SECONDS_PER_TYPE = 300.0  # a hundred times the usual on an idle core
PROCESSES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of one type. `decode`: yes, no, or "no cache" when the model keeps none and runs all tokens again."""

    model_type: str
    prefill: str = "no"
    decode: str = "no"
    unclassified: str = ""
    twin: str = "no"
    twin_parameters: str = ""
    reason: str = ""
    seconds: str = ""


COLUMNS = tuple(column.name for column in fields(Row))


def sweep(types: tuple[str, ...], table: Path) -> dict[str, Row]:
    """Rows of all `types`; those that `table` lacks are run, two at a time, and appended to it."""
    done = read_rows(table)
    if not done:
        table.write_text("\t".join(COLUMNS) + "\n")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.sweep_type"])

    def run(model_type: str) -> Row:
        row = _in_child(context, model_type)
        with table.open("a") as file:
            file.write("\t".join(astuple(row)) + "\n")
        return row

    with ThreadPoolExecutor(PROCESSES) as pool:
        rows = pool.map(run, [name for name in types if name not in done])
        return done | {row.model_type: row for row in rows}


def read_rows(table: Path) -> dict[str, Row]:
    """The rows of a table written earlier; none when it is missing or has other columns."""
    lines = table.read_text().splitlines() if table.exists() else []
    if not lines or tuple(lines[0].split("\t")) != COLUMNS:
        return {}
    rows = (Row(**dict(zip(COLUMNS, line.split("\t"), strict=True))) for line in lines[1:])
    return {row.model_type: row for row in rows}


def _in_child(context: multiprocessing.context.BaseContext, model_type: str) -> Row:
    from support.sweep_type import run_type

    started = time.monotonic()
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=run_type, args=(model_type, theirs))
    child.start()
    theirs.close()
    row = Row(model_type=model_type)
    try:
        while ours.poll(max(0.0, SECONDS_PER_TYPE - (time.monotonic() - started))):
            row = ours.recv()  # the child sends what it knows after each step: a later crash loses no earlier answer
        row = Row(**asdict(row) | {"reason": f"took longer than {SECONDS_PER_TYPE:.0f} s"})
    except EOFError:
        if child.exitcode:
            row = Row(**asdict(row) | {"reason": f"the process died with code {child.exitcode}"})
    child.kill()
    child.join()
    return Row(**asdict(row) | {"seconds": f"{time.monotonic() - started:.1f}"})
