"""Balance of rows over experts and ranks, by hand and as laws."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from introspect.analyzers._moe_balance import Balance

LOADS = ((4, 0, 2, 2), (2, 2, 2, 2))  # two layers of four experts, eight rows each


def test_by_hand():
    balance = Balance(LOADS, ranks=2)

    assert balance.busy_experts == (3 + 4) / 2
    assert balance.rows_mean == 2
    assert balance.rows_max == 4
    assert balance.imbalance == (4 / 2 + 2 / 2) / 2
    assert balance.rank_imbalance == (4 / 4 + 4 / 4) / 2  # 4 + 0 against 2 + 2
    assert balance.slowest_rank_rows == 4
    assert balance.dropped_share(None) is None
    assert balance.dropped_share(2) == 2 / 16
    assert balance.dropped_share(4) == 0


def test_nothing_routed_is_even_and_drops_nothing():
    balance = Balance(((0, 0),))

    assert (balance.imbalance, balance.dropped_share(1), balance.busy_experts) == (1, 0, 0)


@given(st.lists(st.lists(st.integers(0, 50), min_size=4, max_size=4).map(tuple), min_size=1, max_size=5).map(tuple))
def test_ranks_are_never_less_even_than_experts(loads):
    single, double, whole = (Balance(loads, ranks) for ranks in (4, 2, 1))

    assert 1 <= whole.rank_imbalance <= double.rank_imbalance <= single.rank_imbalance == single.imbalance
    assert single.slowest_rank_rows == single.rows_max
    assert whole.rank_imbalance == pytest.approx(1)
    assert single.dropped_share(0) in (0, 1)
