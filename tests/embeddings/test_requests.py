"""Requests of ranks that share memory, against torch operators on the same keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from invdist.embeddings.requests import request_kernels
from invdist.embeddings.row_moves import UniqueRows

RANKS, ROW_BITS, WIDTH = 3, 10, 4


def _keys(rank: int, group: int, high: int) -> Tensor:
    """Keys of some pieces of a batch; the second rank has none in the first group, and nobody asks the third."""
    count = 0 if (rank, group) == (1, 0) else 50 * (rank + 1) + group
    source = torch.Generator().manual_seed(10 * rank + group)
    owner, row = torch.randint(RANKS - 1, (count,), generator=source), torch.randint(high, (count,), generator=source)
    return (owner << ROW_BITS) + row


@pytest.mark.parametrize("high", [1000, 5], ids=["rare", "repeated"])
@pytest.mark.parametrize("summed", [(False, False), (True, True), (False, True)])
def test_an_owner_sums_the_gradients_of_all_ranks(high: int, summed: tuple[bool, bool]) -> None:
    kernels = request_kernels()
    if kernels is None:
        pytest.skip("no C compiler here")
    sent = []
    for rank in range(RANKS):
        of_rank = [_keys(rank, group, high) for group in (0, 1)]
        asked_for = [keys.unique() if summed[group] else keys for group, keys in enumerate(of_rank)]
        message, sizes, asked = kernels.pack(asked_for, RANKS, ROW_BITS, lambda words: torch.empty(words).long())
        assert sum(sizes) <= len(message)
        sent.append((message[: sum(sizes)].split(sizes), asked, asked_for))
    for owner in range(RANKS):
        found = kernels.requests([parts[owner] for parts, *_ in sent], 2)
        for group, requests in enumerate(found):
            shown, expected = [], torch.zeros(1 << ROW_BITS, WIDTH, dtype=torch.float64)
            own_rows: list[Tensor] = []
            for rank in range(RANKS):
                keys, (_, asked, asked_for) = _keys(rank, group, high), sent[rank]
                gradient = torch.randn(len(keys), WIDTH, generator=torch.Generator().manual_seed(rank))
                shown.append(UniqueRows.of(keys).sum(gradient) if summed[group] else gradient)
                own = keys >> ROW_BITS == owner
                expected.index_add_(0, keys[own] % (1 << ROW_BITS), gradient[own].double())
                mine = asked_for[group]
                own_rows.append(mine[mine >> ROW_BITS == owner] % (1 << ROW_BITS))
                assert requests.received[rank] == asked[group][owner] == len(own_rows[-1])
            unique = UniqueRows.of(torch.cat(own_rows))
            for name in ("rows", "order", "starts"):
                assert torch.equal(getattr(requests.unique, name), getattr(unique, name))
            sums = requests.gradients.sum_parts(shown, 0.5)
            torch.testing.assert_close(sums.double(), 0.5 * expected[unique.rows], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [0, 1, 7, 100, 1000, 20_000])
@pytest.mark.parametrize("times", [1.2, 1.7, 2.4, 10])
def test_repetitions_are_estimated(count: int, times: float) -> None:
    """Where keys occur clearly less or more than twice, as a mean."""
    kernels = request_kernels()
    if kernels is None:
        pytest.skip("no C compiler here")
    source = torch.Generator().manual_seed(count)
    distinct = torch.randint(1 << 40, (max(1, int(count / times)),), generator=source)
    keys = distinct.repeat(-(-count // len(distinct)))[:count]
    if count in (0, 1):
        assert not kernels.repeat(keys)
    elif count >= 100:
        assert kernels.repeat(keys) == (times > 2)


def test_each_key_finds_its_answer() -> None:
    kernels = request_kernels()
    if kernels is None:
        pytest.skip("no C compiler here")
    keys = _keys(2, 1, 40)
    owner = keys >> ROW_BITS
    asked = [int((owner == number).sum()) for number in range(RANKS)]
    answers = torch.cat([keys[owner == number] for number in range(RANKS)])
    assert torch.equal(answers[kernels.answer_places(keys, ROW_BITS, asked)], keys)


def test_only_touched_rows_are_packed_and_each_piece_finds_its_own() -> None:
    """Two owners answer one rank; a third asks both of them too."""
    kernels = request_kernels()
    if kernels is None:
        pytest.skip("no C compiler here")
    asked, touched = UniqueRows.of(_keys(2, 1, 40)), torch.arange(0, 40, 3)
    answers, rows = [], []
    for owner in (0, 1):
        values = torch.arange(len(touched)).float().view(-1, 1).expand(-1, WIDTH) + 100 * owner
        own = asked.rows[asked.rows >> ROW_BITS == owner] % (1 << ROW_BITS)
        requests, received = torch.cat([torch.arange(7), own]), [7, len(own)]
        places = UniqueRows.of(touched).find(requests)
        places[places == len(touched)] = -1
        index, packed = torch.empty_like(requests), torch.empty(int((places >= 0).sum()), WIDTH)
        sizes = kernels.pack_deltas(places, received, values.contiguous(), index, packed)
        assert sizes == [3, int((own % 3 == 0).sum())]
        answers.append(index[7:].contiguous())
        rows.append(packed[sizes[0] :])
    joined = kernels.join_deltas(answers, [len(part) for part in rows], asked.inverse)
    whole = torch.cat([*rows, torch.full((1, WIDTH), -1.0)])
    owner, row = _keys(2, 1, 40) >> ROW_BITS, _keys(2, 1, 40) % (1 << ROW_BITS)
    expected = torch.where(row % 3 == 0, row // 3 + 100 * owner, -1).float()
    assert torch.equal(whole[joined], expected.view(-1, 1).expand(-1, WIDTH))
