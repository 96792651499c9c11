"""Results as text: a table for people, markdown, csv or json.

json and csv hold raw figures in base units (bytes, FLOPs, seconds, shares from 0 to 1); the other two are for reading.
csv holds one table after another, each under a line `# name` and followed by an empty line; with one table chosen
(`--table`) it is that table alone, without the line. Text is fitted to a terminal's width by wrapping words and by
stacking columns; nothing is ever left out of markdown, csv and json.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import NoneType

from introspect.errors import UnknownNameError
from introspect.table import Result, Table, Value
from introspect.units import number_text, unit_of

FORMATS = ("table", "markdown", "csv", "json")

TOTALS = "totals"


def render(
    results: Sequence[Result], form: str = "table", *, table: str | None = None, width: int | None = None
) -> str:
    """All results in one of FORMATS, ending in a line break. `table`: only this one, or "totals".

    `width`: columns of the terminal that `table` should fit, None for no limit. UnknownNameError for a `table` that
    the results do not have. A result that is a drawing is printed as it is in every format but json.
    """
    if form == "json":
        documents = [result.to_dict() for result in results]
        return json.dumps(documents[0] if len(documents) == 1 else documents, indent=2, allow_nan=False) + "\n"
    if all(result.text is not None for result in results):
        return "\n".join(f"{result.text}\n" for result in results)
    if form == "csv":
        return _csv(results, table)
    return "\n".join(_page(result, table, markdown=form == "markdown", width=width) for result in results)


def tables_of(result: Result, only: str | None = None) -> dict[str, Table]:
    """The totals, as a table of their own, and the tables of a result; or the one of that name."""
    totals = tuple({"total": name, "value": value} for name, value in result.totals.items())
    tables = {TOTALS: Table(units={"total": "", "value": ""}, rows=totals), **result.tables}
    if only is None:
        return {name: table for name, table in tables.items() if table.rows}
    if only not in tables:
        raise UnknownNameError(f"table of `introspect {result.command}`", only, tables)
    return {only: tables[only]}


def _csv(results: Sequence[Result], only: str | None) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for index, result in enumerate(results):
        # A table of several models says of each row whose it is.
        models = {"model": str(_model_id(result))} if len(results) > 1 else {}
        for name, table in tables_of(result, only).items():
            if only is None:
                out.write(f"# {name}\n")
            if only is None or index == 0:
                writer.writerow([*models, *table.units])
            writer.writerows([*models.values(), *map(_csv_cell, row.values())] for row in table.rows)
            if only is None:
                out.write("\n")
    return out.getvalue()


def _csv_cell(value: Value) -> Value:
    return json.dumps(value) if isinstance(value, (list, bool)) else value


def _model_id(result: Result) -> Value:
    return result.model["id"] if result.model else None


def _page(result: Result, only: str | None, *, markdown: bool, width: int | None) -> str:
    """One result for reading: what was run, totals, tables, then everything that the figures rest on."""
    parts = [] if only else [_heading(result, markdown)]
    for name, table in tables_of(result, only).items():
        columns = _totals_columns(result) if name == TOTALS else _columns(table)
        title = [] if only else [f"**{name}**\n" if markdown else f"\n{name}"]
        parts += [*title, _markdown_table(columns) if markdown else _text_table(columns, width)]
    if not only:
        lists = {"assumptions": result.assumptions, "notes": result.notes, "unclassified": result.unclassified}
        parts += [_bullets(name, lines, markdown) for name, lines in lists.items() if lines]
    return ("\n\n" if markdown else "\n").join(part.rstrip() for part in parts) + "\n"


def _heading(result: Result, markdown: bool) -> str:
    model = result.model or {}
    named = [str(model["id"]), f"({model['class']})"] if model else []
    if "other" in model:
        named += ["against", str(model["other"]), f"({model['other_class']})"]
    first = " ".join(["introspect", result.command, *named])
    run = ", ".join(f"{name} {value}" for name, value in result.run.items() if value is not None)
    rest = [f"config: {model['source']}"] if model else []
    rest += [f"run: {run}"] if run else []
    return "\n\n".join([f"## {first}", *rest]) if markdown else "\n".join([first, *rest])


def _bullets(title: str, lines: Iterable[str], markdown: bool) -> str:
    items = "\n".join(f"- {line}" for line in lines)
    return f"**{title}**\n\n{items}" if markdown else f"\n{title}\n{items}"


_HEADER_PADDING = 2  # what tabulate adds to every column's name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """One column as text: its cells, and whether they are figures (right-aligned, never wrapped)."""

    name: str
    cells: tuple[str, ...]
    figures: bool

    @property
    def cell_width(self) -> int:
        return max((len(line) for cell in self.cells for line in cell.split("\n")), default=0)

    @property
    def width(self) -> int:
        return max(self.cell_width, max(map(len, self.name.split("\n"))) + _HEADER_PADDING)


def _columns(table: Table) -> list[_Column]:
    return [_column(name, unit, [row[name] for row in table.rows]) for name, unit in table.units.items()]


def _column(name: str, unit: str, values: Sequence[Value]) -> _Column:
    figures = all(isinstance(value, (int, float, NoneType)) and not isinstance(value, bool) for value in values)
    return _Column(name=name, cells=tuple(_cell(value, unit) for value in values), figures=figures)


def _totals_columns(result: Result) -> list[_Column]:
    """Totals for reading, and beside each rounded figure the exact one."""
    values = tuple(_cell(value, unit_of(name)) for name, value in result.totals.items())
    exact = tuple(_cell(value, "") for value in result.totals.values())
    return [
        _column("total", "", list(result.totals)),
        _Column(name="value", cells=values, figures=True),
        _Column(
            name="exact",
            cells=tuple("" if full == short else full for full, short in zip(exact, values, strict=True)),
            figures=True,
        ),
    ]


def _cell(value: Value, unit: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return number_text(value, unit)
    if isinstance(value, list):
        return (" x " if all(isinstance(item, int) for item in value) else ", ").join(map(str, value))
    return value


def _tabulate(columns: Sequence[_Column], tablefmt: str) -> str:
    from tabulate import tabulate  # 45 ms that json and csv do not need

    text: str = tabulate(
        list(zip(*(column.cells for column in columns), strict=True)),
        headers=[column.name for column in columns],
        tablefmt=tablefmt,
        disable_numparse=True,
        colalign=["right" if column.figures else "left" for column in columns],
    )
    return text


def _markdown_table(columns: Sequence[_Column]) -> str:
    escaped = [
        _Column(name=c.name, cells=tuple(cell.replace("|", "\\|") for cell in c.cells), figures=c.figures)
        for c in columns
    ]
    return _tabulate(escaped, "pipe")


_GAP = 2  # between columns of tabulate's "simple" format
_NARROWEST = 32  # a text column is not folded to less than this
_SHORTEST = 10  # nor a column's name


def _text_table(columns: list[_Column], width: int | None) -> str:
    """The table, fitted to `width`: empty columns left out, then names and texts folded, then columns stacked."""
    if width is None or _total_width(columns) <= width:
        return _tabulate(columns, "simple")
    columns = _narrowed([column for column in columns if set(column.cells) != {"-"}] or columns, width)
    return "\n\n".join(_tabulate(block, "simple") for block in _blocks(columns, width))


def _total_width(columns: Sequence[_Column]) -> int:
    return sum(column.width + _GAP for column in columns) - _GAP


def _narrowed(columns: list[_Column], width: int) -> list[_Column]:
    """Names folded to the width of their figures, then the widest texts until the table fits or nothing is left."""
    narrow = [_folded(column, column.cell_width) for column in columns]
    for index in sorted(range(len(narrow)), key=lambda i: -narrow[i].width):
        excess = _total_width(narrow) - width
        if excess > 0 and not narrow[index].figures:
            narrow[index] = _folded(columns[index], max(_NARROWEST, narrow[index].width - excess))
    return narrow


def _folded(column: _Column, limit: int) -> _Column:
    cells = column.cells if column.figures else tuple(_fold(cell, limit) for cell in column.cells)
    return _Column(name=_fold(column.name, max(_SHORTEST, limit)), cells=cells, figures=column.figures)


def _fold(text: str, limit: int) -> str:
    """Break into lines of at most `limit`, after a space or one of +._/ where there is one."""
    lines = [""]
    for part in re.findall(rf"[^ +._/]{{0,{limit - 1}}}[ +._/]?", text):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > limit:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def _blocks(columns: Sequence[_Column], width: int) -> list[list[_Column]]:
    """Which columns stand beside each other: as many as fit, every block starting with the first column."""
    first = columns[0]
    blocks = [[first]]
    for column in columns[1:]:
        if len(blocks[-1]) > 1 and _total_width([*blocks[-1], column]) > width:
            blocks.append([first])
        blocks[-1].append(column)
    return blocks
