"""functions: calls that only Python sees keep the values that a run follows."""

from __future__ import annotations

import pytest
import torch
from support.tiny import IDENTITY
from torch import nn

from introspect.hooks.functions import _with_values
from introspect.hooks.observe import observe
from introspect.records import RunShape


class Asks(nn.Module):
    """Looks for a token among the last and the first, as transformers does for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4, device="meta")

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.table(input_ids) * (2 if 3 in input_ids[:, [-1, 0]] else 1)


@pytest.mark.parametrize(("ids", "found"), [([[3, 0, 0]], "True"), ([[0, 3, 0]], "False"), ([[0, 0, 3]], "True")])
def test_a_list_that_indexes_loses_no_value(ids, found):
    trace = observe(Asks(), IDENTITY, RunShape(seq=3), inputs={"input_ids": torch.tensor(ids)})

    assert [(one.answer, one.answered) for one in trace.decisions] == [(found, "value")]


@pytest.mark.parametrize(
    "index",
    [[0, 2], (slice(None), [-1, 0]), ([0, 1], [1, 2]), [True, False, True], ([[0, 1], [1, 2]],), (..., [0]), 1, []],
)
def test_an_index_means_the_same(index):
    table = torch.arange(12).view(3, 4)

    assert torch.equal(table[index], table[_with_values(index)])
