"""Folding findings over layers and experts, and their order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from introspect.analyzers._findings import MOST_ROWS, Finding, blocks, findings_table, printable, ranges, split_name
from introspect.check_kinds import KINDS, ORDER


def rows(*findings):
    return findings_table(findings)[0].rows


def missing(name, **more):
    return Finding(kind="missing", tensor=name, expected="bf16 [2]", found="not stored", **more)


def test_layers_and_experts_fold_into_one_row():
    names = [f"m.layers.{layer}.experts.{e}.w1.weight" for layer in range(3, 6) for e in range(4)]

    (row,) = rows(*map(missing, names))

    assert (row["tensor"], row["layers"], row["count"]) == ("m.layers.*.experts.*.w1.weight", "3-5, 0-3", 12)


def test_a_number_that_does_not_vary_stays():
    (row,) = rows(missing("layers.1.mlp.0.w"), missing("layers.2.mlp.0.w"))

    assert (row["tensor"], row["layers"]) == ("layers.*.mlp.0.w", "1-2")


def test_what_is_no_full_product_becomes_several_rows():
    folded = rows(missing("l.0.e.0.w"), missing("l.0.e.1.w"), missing("l.1.e.1.w"))

    assert [(row["tensor"], row["layers"], row["count"]) for row in folded] == [
        ("l.0.e.*.w", "0-1", 2),
        ("l.1.e.1.w", "", 1),
    ]


def test_other_expectations_are_other_rows():
    folded = rows(missing("l.0.w"), Finding(kind="missing", tensor="l.1.w", expected="bf16 [3]", found="not stored"))

    assert len(folded) == 2


def test_files_are_named_or_counted():
    same = rows(missing("l.0.w", file="a"), missing("l.1.w", file="a"))
    other = rows(missing("l.0.w", file="a"), missing("l.1.w", file="b"))

    assert (same[0]["file"], other[0]["file"]) == ("a", "2 files")


def test_most_serious_first():
    kinds = list(KINDS)

    folded = rows(*(Finding(kind=kind, tensor="t") for kind in reversed(kinds)))

    ranks = {"error": 0, "warning": 1, "note": 2}
    order = [(ranks[row["severity"]], ORDER[row["kind"]]) for row in folded]
    assert order == sorted(order)
    assert len(folded) == len(kinds)


def test_every_kind_has_a_cause_and_a_remedy():
    assert all(kind.cause and kind.remedy for kind in KINDS.values())
    assert all(kind.severity == "error" for kind in KINDS.values() if kind.unreadable)


@given(st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 2)), max_size=40))
def test_blocks_are_full_products_that_cover_each_member_once(members):
    found = []
    for block in blocks(members):
        product = [()]
        for numbers in block:
            product = [(*before, number) for before in product for number in numbers]
        found += product

    assert len(found) == len(members)
    assert set(found) == members


@given(st.sets(st.integers(0, 60)))
def test_ranges_can_be_read_back(numbers):
    back = set()
    for part in filter(None, ranges(numbers).split(",")):
        first, _, last = part.partition("-")
        back |= set(range(int(first), int(last or first) + 1))

    assert back == numbers


@pytest.mark.parametrize(
    ("name", "pattern", "numbers"),
    [
        ("model.layers.10.w", "model.layers.*.w", (10,)),
        ("0.weight", "*.weight", (0,)),
        ("h1.w", "h1.w", ()),
        ("", "", ()),
        ("a." + "1." * 2000 + "w", "a." + "1." * 2000 + "w", ()),
        ("a." + "9" * 50, "a." + "9" * 50, ()),
    ],
)
def test_names_are_split(name, pattern, numbers):
    assert split_name(name) == (pattern, numbers)


@given(st.text())
def test_any_text_is_made_safe(text):
    shown = printable(text)

    assert shown.isprintable()
    assert len(shown) < 500
    shown.encode()


def test_rows_are_bounded_and_the_most_serious_stay():
    notes = [Finding(kind="ignored", tensor=f"t{n}") for n in range(MOST_ROWS)]

    table, left_out = findings_table([*notes, missing("a"), missing("b")])

    assert (len(table.rows), left_out) == (MOST_ROWS, 2)
    assert [row["tensor"] for row in table.rows[:2]] == ["a", "b"]


def test_hostile_names_do_not_hang():
    names = [f"x.{n}.{'1.' * (n % 9)}w" for n in range(3000)]

    folded = rows(*map(missing, names))

    assert sum(row["count"] for row in folded) == 3000
