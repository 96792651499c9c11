"""The sweep's own table: what it holds is read back, what it lacks is run."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from support import sweep as sweeping
from support.sweep import COLUMNS, Row, read_rows, sweep

DONE = Row(model_type="done", prefill="yes", decode="yes", twin="yes", twin_parameters="7", seconds="1.0")


@pytest.fixture
def table(tmp_path):
    return tmp_path / "table.tsv"


def test_only_types_the_table_lacks_are_run_and_their_rows_are_appended(table, monkeypatch):
    table.write_text("\n".join("\t".join(line) for line in (COLUMNS, astuple(DONE))) + "\n")
    monkeypatch.setattr(sweeping, "_in_child", lambda _, name: Row(model_type=name, reason="ran"))

    rows = sweep(("done", "new"), table)

    assert rows == {"done": DONE, "new": Row(model_type="new", reason="ran")}
    assert read_rows(table) == rows


def test_a_table_with_other_columns_is_started_anew(table):
    table.write_text("type\tfound\nllama\tyes\n")

    assert read_rows(table) == {}
