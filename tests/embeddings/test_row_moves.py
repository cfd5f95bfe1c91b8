"""Moves of rows against plain indexing, and the form of `UniqueRows` for GPUs against the exact one."""

from __future__ import annotations

import pytest
import torch

from invdist.embeddings.row_moves import UniqueRows, gather_rows

LISTS = [
    torch.tensor([5, 2, 5, 9, 2, 5, 0]),
    torch.tensor([7]),
    torch.tensor([3, 3, 3]),
    torch.tensor([4, 1, 8]),
    torch.empty(0, dtype=torch.int64),
]


def test_gather_is_indexing() -> None:
    table = torch.randn(11, 8)
    table[3] = torch.nan
    for rows in LISTS:
        torch.testing.assert_close(gather_rows(table, rows), table[rows], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("occurrences", LISTS)
@pytest.mark.parametrize("exact", [True, False])
def test_unique_rows(occurrences: torch.Tensor, exact: bool) -> None:
    unique = UniqueRows.of(occurrences, exact=exact)
    distinct, inverse = occurrences.unique(return_inverse=True)
    count = len(distinct)
    values = torch.randn(len(occurrences), 4)
    sums = torch.zeros(count, 4).index_add_(0, inverse, values)
    seen = unique.sum(values)
    assert torch.equal(unique.rows[:count], distinct)
    assert torch.allclose(seen[:count], sums)
    # What is there beyond repeats the last row in everything, so storing it twice changes nothing.
    assert (unique.rows[count:] == distinct[-1:]).all()
    assert torch.equal(seen[count:], seen[count - 1 : count].expand(len(seen) - count, -1))
    assert torch.allclose(unique.square_sum(seen), sums.square().sum())
    edges = torch.tensor([0, 3, 5, 6, 100])
    assert unique.below(edges).tolist() == [int((distinct < edge).sum()) for edge in edges]
    first = unique.first(count)
    assert torch.equal(first.rows, distinct)
    assert torch.equal(first.inverse, inverse)
    assert torch.allclose(first.sum(values), sums)
    wanted = torch.tensor([0, 5, 6])
    found = unique.find(wanted)
    padded = torch.cat([unique.rows, torch.tensor([-1])])
    assert padded[found].tolist() == [row if row in distinct.tolist() else -1 for row in wanted.tolist()]
