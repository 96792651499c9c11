"""The list of what can be found, and its page in the documentation."""

from pathlib import Path

import pytest

from introspect.check_kinds import KINDS

DOCUMENT = Path(__file__).parents[1] / "docs" / "check.md"


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_every_kind_is_documented_as_it_is(kind):
    severity = f"{kind.severity}, exit 2" if kind.unreadable else kind.severity

    assert f"| `{kind.name}` | {severity} | {kind.cause} | {kind.remedy} |\n" in DOCUMENT.read_text(encoding="utf-8")


def test_the_document_is_in_the_order_of_seriousness():
    rows = [line.split("`")[1] for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]

    assert rows == list(KINDS)


def test_severities_only_fall():
    ranks = [("error", "warning", "note").index(kind.severity) for kind in KINDS.values()]

    assert ranks == sorted(ranks)
