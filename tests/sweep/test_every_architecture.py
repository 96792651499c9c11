"""Every causal language model type of transformers: traced in both phases, nothing unclassified, meta = real.

The table goes to $SWEEP_OUT/architectures.tsv; a table that is there already is continued.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.architectures import TYPES
from support.sweep import sweep

UNVERIFIED: dict[str, str] = json.loads((Path(__file__).parents[1] / "data" / "unverified_twins.json").read_text())
"""Types whose twin cannot agree with meta, each with the reason."""

# Types that keep no cache: their models run all tokens again for each new one.
WITHOUT_CACHE = {"openai-gpt", "xlm"}
LEAST_VERIFIED = 195


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = Path(os.environ.get("SWEEP_OUT") or tmp_path_factory.mktemp("sweep"))
    return sweep(TYPES, folder / "architectures.tsv")


@pytest.mark.sweep
def test_every_type_has_a_row(rows):
    assert rows.keys() == set(TYPES)


@pytest.mark.sweep
def test_every_type_traces_its_prefill(rows):
    assert {name: row.reason for name, row in rows.items() if row.prefill != "yes"} == {}


@pytest.mark.sweep
def test_every_type_with_a_cache_traces_its_decode(rows):
    assert {name: row.reason for name, row in rows.items() if row.decode not in ("yes", "no cache")} == {}
    assert {name for name, row in rows.items() if row.decode == "no cache"} == WITHOUT_CACHE


@pytest.mark.sweep
def test_no_op_of_any_type_is_unclassified(rows):
    assert {name: row.unclassified for name, row in rows.items() if row.unclassified} == {}


@pytest.mark.sweep
def test_every_twin_runs_for_real_as_on_meta_but_those_listed_with_their_reason(rows):
    unverified = {name: row.reason for name, row in rows.items() if row.twin != "yes"}

    assert unverified.keys() - UNVERIFIED.keys() == set(), unverified
    assert len(rows) - len(unverified) >= LEAST_VERIFIED
