"""The positives that `t_ce` leaves out, found without a read by the host: those that the plain search finds."""

from __future__ import annotations

import torch

from invdist.data.stream.blocks import rank_rows
from invdist.embeddings.comm import Comm
from invdist.learning.strategies.t_ce import globally_largest, largest_on_device
from tests.distributed import run_ranks


def _differences(rank: int, size: int) -> list[str]:
    comm, wrong = Comm(), []
    for seed in range(40):
        source = torch.Generator().manual_seed(seed)
        rows = 1 + seed % 17
        low, high = rank_rows(rows, rank, size)
        values = torch.randint(6, (rows,), generator=source).float()[low:high]  # with ties
        among = (torch.rand(rows, generator=source) < (seed % 5) / 4)[low:high]
        for share in (0.0, 0.1, 0.29, 0.5, 1.0):
            positive = among.nonzero().view(-1)
            expected = torch.zeros_like(among)
            expected[positive[globally_largest(values[positive], share, comm)]] = True
            if not torch.equal(largest_on_device(values, among, share, comm, rows), expected):
                wrong.append(f"{seed} {share}")
    return wrong


def test_the_same_rows_are_found_without_reading_any() -> None:
    assert run_ranks(_differences, 3) == [[], [], []]
