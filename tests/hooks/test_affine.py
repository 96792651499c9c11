from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from introspect.hooks.affine import Fit, NotAffine
from introspect.records import Gemm, Op, Repeat, Tensor


def fit(target: int = 100, tables=((), (), ())) -> Fit:
    return Fit(lengths=(12, 16, 24), target=target, tables=tables)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(24, 10**6))
def test_a_number_that_grows_in_proportion_is_predicted(constant, slope, target):
    assert fit(target).number([constant + slope * n for n in (12, 16, 24)]) == constant + slope * target


@pytest.mark.parametrize("values", [(12 * 12, 16 * 16, 24 * 24), (1, 1, 2), (12, 16, 16)])
def test_any_other_growth_is_refused(values):
    with pytest.raises(NotAffine):
        fit().number(values)


def test_a_count_per_chunk_must_come_out_whole():
    assert fit(target=112).number((3, 4, 6)) == 28
    with pytest.raises(NotAffine):
        fit(target=113).number((3, 4, 6))


def runs(lengths=(12, 16, 24)):
    """A loop over the tokens around one product [1, 4] x [4, S]."""
    tables, nodes = [], []
    for n in lengths:
        tables.append(
            [Tensor(storage=0, offset=0, shape=(4, n), dtype="fp32", role="activation", storage_bytes=16 * n)]
        )
        gemm = Gemm(kind="scan", batch=1, m=1, k=4, n=n, lhs=None, rhs=0, out=None)
        body = (Op(name="mm", module="scan", kind="gemm", inputs=(0,), outputs=(), gemms=(gemm,)),)
        nodes.append((Repeat(body=body, count=n - 1),))
    return tables, nodes


def test_loops_products_and_tensors_follow_the_length():
    tables, nodes = runs()
    fitted = fit(target=1000, tables=tables)
    (loop,) = fitted.nodes(nodes)

    assert loop.count == 999
    assert loop.body[0].gemms[0].n == 1000
    assert fitted.tensors[loop.body[0].inputs[0]].storage_bytes == 16_000


def test_runs_of_different_structure_are_refused():
    tables, nodes = runs()
    nodes[2] = (*nodes[2], *nodes[2])

    with pytest.raises(NotAffine, match="folded ops"):
        fit(tables=tables).nodes(nodes)
