"""Collectives through shared memory give what gloo gives, in any order of waiting, and never hang."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from invdist.embeddings import boards, shared_memory
from invdist.embeddings.boards import RankLost
from invdist.embeddings.comm import Comm
from invdist.embeddings.locate import Pairs
from invdist.embeddings.shared_memory import SharedMemoryComm, connect
from invdist.models.build import ModelSpec, build_recommender
from tests.distributed import run_ranks


def _both(rank: int, ranks: int) -> int:
    """The same collectives by gloo and through shared memory; gives how many were compared."""
    gloo, shared = Comm(), connect()
    assert isinstance(shared, SharedMemoryComm)
    waiting: list[tuple[Any, Any]] = []
    compared = 0
    for number in range(400):
        source = torch.Generator().manual_seed(number)
        sizes = torch.randint(0, 7 if number % 9 else 3000, (ranks, ranks), generator=source)
        kind = number % 4
        if kind == 3:
            values = torch.randn(number % 50, generator=torch.Generator().manual_seed(number * ranks + rank))
            pair = gloo.all_reduce(values.clone()), shared.all_reduce(values.clone())
        else:
            send, received = sizes[rank].tolist(), sizes[:, rank].tolist()
            shape = (sum(send),) if kind == 0 else (sum(send), 8)
            values = torch.randn(shape) if kind else torch.randint(1 << 40, shape)
            pair = gloo.all_to_all(values, send, received), shared.all_to_all(values, send, received)
        waiting.append(pair)
        if number % 7 == 0:  # wait for some of them, the latest first
            for a, b in reversed(waiting[number % 3 :]):
                expected, seen = a.wait(), b.wait()
                if kind == 3 and ranks > 2:
                    assert torch.allclose(expected, seen, atol=1e-6)  # gloo sums in another order
                assert expected.shape == seen.shape
                assert torch.allclose(expected.double(), seen.double(), atol=1e-6)
                compared += 1
            del waiting[number % 3 :]
    shared.barrier()
    # No more buffers than can be in use at once, however many messages there were.
    assert len(shared._opened[rank]) < 60
    return compared


@pytest.mark.parametrize("ranks", [2, 4])
def test_it_gives_what_gloo_gives(ranks: int) -> None:
    assert all(compared > 350 for compared in run_ranks(_both, ranks))


def _unread(rank: int, ranks: int) -> list[Any]:
    """More messages than the board has lines, while early ones are not waited for, or dropped."""
    comm = connect()
    kept = comm.all_reduce(torch.tensor([1.0 + rank]))
    sent, shown = (torch.arange(4.0) + 10 * rank for _ in range(2))
    parts = [comm.all_to_all(sent, [1, 3]), comm.show(shown, 4)]
    joined = comm.all_to_all(sent, [1, 3])
    comm.all_reduce(torch.tensor([5.0]))  # dropped
    for _ in range(2 * boards.LINES):
        comm.send_buffer(4, 1, sent).fill_(-1)
        comm.all_to_all(-torch.ones(4), [2, 2]).wait()
    of_ranks = [part.use(lambda found: [each.tolist() for each in found]) for part in parts]
    return [kept.wait().tolist(), *of_ranks, joined.wait().tolist(), joined.wait().tolist()]


def test_messages_nobody_waits_for_block_nothing() -> None:
    """And what arrived in parts is still in parts when it is used at last."""
    shown = [[0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]]
    first, second = [[0.0], [10.0]], [[1.0, 2.0, 3.0], [11.0, 12.0, 13.0]]
    of_ranks = run_ranks(_unread, 2)
    for found, sent in zip(of_ranks, (first, second), strict=True):
        whole = [*sent[0], *sent[1]]
        assert found == [[3.0], sent, shown, whole, whole]


def _train(rank: int, ranks: int, by_gloo: bool, **spec: Any) -> np.ndarray:
    """Rows after some steps, where ranks are late at random and loaded rows are read right after a step."""
    comm = Comm() if by_gloo else connect()
    spec = {"sharding": "row_wise", "users": 40, **spec}
    model = build_recommender(ModelSpec(items=30, dim=8, batch_size=16, **spec), torch.device("cpu"), comm)
    source, late = torch.Generator().manual_seed(rank), torch.Generator().manual_seed(100 + rank)
    everything, seen = Pairs(torch.arange(30) % spec["users"], torch.arange(30)), []
    for step in range(60):
        user, item = (torch.randint(size, (16,), generator=source) for size in (spec["users"], 30))
        exchange = model.exchange(Pairs(user, item))
        ahead = model.exchange(everything).finish()  # as in training: the ids of the next step do not wait for this one
        rows = model.pull(exchange)[0]
        time.sleep(0.002 * float(torch.rand(1, generator=late)))
        loss = model.logits(rows, exchange.routes[0]).square().sum()
        gradient, _ = model.gradient(loss, 16, rows, exchange.routes[0])
        time.sleep(0.002 * float(torch.rand(1, generator=late)))
        model.step(gradient)
        if step % 3 == 1:
            time.sleep(0.002 * float(torch.rand(1, generator=late)))
            model.add(gradient, -0.1)
        if step % 10 == 9:
            with model.rows.rewriting():
                time.sleep(0.002 * float(torch.rand(1, generator=late)))
                model.rows.local_rows.mul_(0.5)
        seen += [model.rows.pull(ahead)[0], model.rows.lookup_delta(ahead.routes[0], gradient.rows).dense()]
    return torch.stack(seen).numpy()


# With 3 users most rows repeat within a batch: a rank sums their gradients before others read them.
@pytest.mark.parametrize("spec", [{}, {"users": 3}, {"sharding": "column_wise"}, {"payload": "bf16"}], ids=str)
def test_ranks_read_each_others_rows_when_they_are_written(spec: dict[str, Any]) -> None:
    by_gloo, shared = (run_ranks(partial(_train, by_gloo=by_gloo, **spec), 2) for by_gloo in (True, False))
    for expected, seen in zip(by_gloo, shared, strict=True):
        assert np.array_equal(expected, seen)


def _frozen(rank: int, ranks: int) -> tuple[list[int], bool]:
    """Messages of reading rows before and after they are frozen, and whether the rows are the same."""
    comm, messages, seen = connect(), [], []
    spec = ModelSpec(users=40, items=30, dim=8, batch_size=16, sharding="row_wise")
    model = build_recommender(spec, torch.device("cpu"), comm)
    exchange = model.exchange(Pairs(torch.arange(30), torch.arange(30))).finish()
    assert isinstance(comm, SharedMemoryComm)
    for freeze in (False, True):
        if freeze:
            model.rows.freeze()
        before = comm._number
        seen.append(model.rows.pull(exchange)[0])
        messages.append(comm._number - before)
    return messages, torch.equal(*seen)


def test_rows_that_never_change_are_read_without_a_message() -> None:
    assert run_ranks(_frozen, 2) == [([1, 0], True)] * 2


def _share(rank: int, ranks: int) -> list[float]:
    comm, own = connect(), torch.full((rank, 4), float(rank))
    shared = comm.share(own)
    assert shared is not None
    assert own.untyped_storage().nbytes() == 0
    comm.barrier()
    shared[rank] += 10
    comm.barrier()
    return [table.sum().item() for table in shared]


def test_a_shared_table_is_seen_by_all() -> None:
    assert run_ranks(_share, 3) == [[0.0, 44.0, 96.0]] * 3


def _wait_for_the_dead(rank: int, ranks: int) -> str:
    comm = connect()
    assert isinstance(comm, SharedMemoryComm)
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    if rank == 1:
        return ""  # sends nothing, like a rank that was killed
    comm.boards.pids[1] = child
    started = time.monotonic()
    try:
        comm.barrier()
    except RankLost as error:
        assert time.monotonic() - started < 20
        return str(error)
    return "no error"


def test_a_rank_that_was_killed_is_an_error_and_no_hang() -> None:
    assert run_ranks(_wait_for_the_dead, 2)[0].startswith("rank 1 ended while rank 0 waited")


def _late(rank: int, ranks: int) -> str:
    comm = connect(timeout_s=1.0)
    if rank == 1:
        time.sleep(3)
        return ""
    try:
        comm.barrier()
    except RankLost as error:
        return str(error)
    return "no error"


def test_a_rank_that_does_not_answer_is_an_error() -> None:
    assert "rank 0 waited 1 s" in run_ranks(_late, 2)[0]


def _elsewhere(rank: int, ranks: int) -> str:
    shared_memory.socket.gethostname = lambda: f"host-{rank}"
    return type(connect()).__name__


def test_ranks_of_several_hosts_use_gloo() -> None:
    assert run_ranks(_elsewhere, 2) == ["Comm", "Comm"]


def _without_memory(rank: int, ranks: int) -> tuple[str, float]:
    if rank == 1:
        os.memfd_create = lambda *_: os.open("/nowhere", os.O_RDONLY)
    comm = connect()
    return type(comm).__name__, comm.all_reduce(torch.ones(1)).wait().item()


def test_a_rank_that_may_not_share_memory_makes_all_use_gloo() -> None:
    assert run_ranks(_without_memory, 2) == [("Comm", 2.0)] * 2


def test_one_rank_needs_nothing() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert type(connect()) is Comm
    finally:
        dist.destroy_process_group()
