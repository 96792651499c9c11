"""Findings of a checkpoint, folded over layers and experts and put in order, most serious first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from introspect.check_kinds import KINDS, ORDER
from introspect.table import Table, Value

COLUMNS = ("kind", "severity", "tensor", "layers", "file", "expected", "found", "cause", "remedy", "count")
UNITS = dict.fromkeys(COLUMNS, "")
_RANKS = {"error": 0, "warning": 1, "note": 2}
MOST_ROWS = 5000
_LONGEST = 200
_MOST_NUMBERS = 8

Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing worth saying about one tensor (None: the file, the index or the checkpoint).

    `cause` and `remedy` replace the usual ones of the kind where more is known. `count`: tensors it stands for.
    """

    kind: str
    tensor: str | None = None
    file: str = ""
    expected: str = ""
    found: str = ""
    cause: str | None = None
    remedy: str | None = None
    count: int = 1


def findings_table(findings: Iterable[Finding]) -> tuple[Table, int]:
    """(a table, rows left out): one row for all findings that differ only in numbers of the tensor's name or the file.

    `tensor` has `*` for such a number, `layers` says which: "0-31", or "3-60, 0-255" for two of them (layer, expert).
    Every row stands for all combinations of its numbers, `count` of them. A file made to confuse can have more rows
    than MOST_ROWS; the most serious ones stay.
    """
    groups: defaultdict[tuple[str, ...], dict[Numbers, list[Finding]]] = defaultdict(lambda: defaultdict(list))
    for finding in findings:
        pattern, numbers = split_name(finding.tensor or "")
        alike = (finding.kind, pattern, finding.expected, finding.found, finding.cause or "", finding.remedy or "")
        groups[alike][numbers].append(finding)
    rows = [row for (_, pattern, *_), members in groups.items() for row in _rows(pattern, members)]
    rows.sort(key=_seriousness)
    return Table(units=UNITS, rows=tuple(rows[:MOST_ROWS])), max(0, len(rows) - MOST_ROWS)


def split_name(name: str) -> tuple[str, Numbers]:
    """("model.layers.*.mlp.experts.*.w1.weight", (3, 17)) of a tensor's name: its numbered parts taken out."""
    parts = name.split(".")
    numbers = tuple(int(part) for part in parts if _is_number(part))
    if len(numbers) > _MOST_NUMBERS:  # no model's name: a file made to confuse
        return name, ()
    return ".".join("*" if _is_number(part) else part for part in parts), numbers


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit() and len(part) < 10


def _rows(pattern: str, members: dict[Numbers, list[Finding]]) -> list[dict[str, Value]]:
    rows: list[dict[str, Value]] = []
    for block in blocks(set(members)):
        inside = [finding for numbers in _combinations(block) for finding in members[numbers]]
        rows.append(_row(pattern, block, inside))
    return rows


def _row(pattern: str, block: tuple[Numbers, ...], inside: list[Finding]) -> dict[str, Value]:
    first = inside[0]
    kind = KINDS[first.kind]
    files = sorted({finding.file for finding in inside if finding.file})
    name = pattern
    for numbers in block:  # a number that does not vary stays in the name
        name = name.replace("*", "\0" if len(numbers) > 1 else str(numbers[0]), 1)
    return {
        "kind": kind.name,
        "severity": kind.severity,
        "tensor": printable(name.replace("\0", "*")) or None,
        "layers": ", ".join(ranges(numbers) for numbers in block if len(numbers) > 1),
        "file": printable(files[0] if len(files) == 1 else f"{len(files)} files" if files else ""),
        "expected": printable(first.expected),
        "found": printable(first.found),
        "cause": printable(first.cause or kind.cause),
        "remedy": printable(first.remedy or kind.remedy),
        "count": sum(finding.count for finding in inside),
    }


def blocks(members: set[Numbers]) -> list[tuple[Numbers, ...]]:
    """Split a set of number tuples of one length into full products: ((3, 4, 5), (0, 1)) is {3, 4, 5} x {0, 1}."""
    if not members or members == {()}:
        return [()] if members else []
    rests: defaultdict[int, set[Numbers]] = defaultdict(set)
    for first, *rest in members:
        rests[first].add(tuple(rest))
    alike: defaultdict[frozenset[Numbers], list[int]] = defaultdict(list)
    for first, tails in rests.items():
        alike[frozenset(tails)].append(first)
    return [
        (tuple(sorted(firsts)), *block)
        for tails, firsts in sorted(alike.items(), key=lambda item: min(item[1]))
        for block in blocks(set(tails))
    ]


def _combinations(block: tuple[Numbers, ...]) -> list[Numbers]:
    combined: list[Numbers] = [()]
    for numbers in block:
        combined = [(*before, number) for before in combined for number in numbers]
    return combined


def ranges(numbers: Iterable[int]) -> str:
    """ "0-2,5" for 0, 1, 2, 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def printable(text: str) -> str:
    """Text of a file, made safe for a terminal: no control characters, no lone surrogates, bounded in length."""
    if not text.isprintable():
        text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text[: 4 * _LONGEST])
    return text if len(text) <= 2 * _LONGEST else f"{text[: 2 * _LONGEST]}..."


def _seriousness(row: dict[str, Value]) -> tuple[int, int, int, str]:
    count = row["count"]
    return (
        _RANKS[str(row["severity"])],
        ORDER[str(row["kind"])],
        -count if isinstance(count, int) else 0,
        str(row["tensor"]),
    )
