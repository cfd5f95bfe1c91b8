"""Slices of a run in one process, without Ray: rows, ids, scores and top-k of slices are those of whole tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from invdist.runtime.process import one_thread
from invdist.serving.recommendation import recommendations
from invdist.serving.run import open_run
from invdist.serving.scoring import Scorer, ScoreTables, logits
from invdist.serving.seen import SeenPairs
from invdist.serving.sharded.jobs import _merge, _rank, _score
from invdist.serving.sharded.slices import Slice
from invdist.serving.sharded.workers import ShardedRun
from invdist.serving.topk import batches

SEEN = ("train", "training_test")


class _Worker:
    """A worker as jobs see it."""

    def __init__(self, run: ShardedRun, slice_: Slice, number: int) -> None:
        self.run, self.slice, self.number = run, slice_, number

    def keep(self, key: Any, make: Callable[[], Any]) -> Any:
        return make()


class _Direct:
    """Peers in this process."""

    def __init__(self) -> None:
        self.slices: list[Slice] = []

    def ask(self, worker: int, method: str, *arguments: Any) -> Callable[[], Any]:
        answer = getattr(self.slices[worker], method)(*arguments)
        return lambda: answer


def _workers(run: Path, count: int) -> list[Any]:
    opened, peers = open_run(run), _Direct()
    sharded = ShardedRun(opened.folder, opened.config, opened.dataset, opened.checkpoint, peers, count)
    peers.slices = [Slice(sharded, sharded.cuts, number) for number in range(count)]
    return [_Worker(sharded, slice_, number) for number, slice_ in enumerate(peers.slices)]


@pytest.mark.parametrize("kind", ["gmf", "neumf", "vectors", "means"])
def test_slices_score_and_rank_as_whole_tables_do(run_of: Callable[[str], Path], kind: str) -> None:
    whole, workers = open_run(run_of(kind)), _workers(run_of(kind), 3)
    source, last = np.random.default_rng(0), workers[-1]
    user, item = source.integers(200, size=5000), source.integers(300, size=5000)
    np.testing.assert_array_equal(logits(last.run.model, user, item), logits(whole.model, user, item))

    given = pa.array(source.integers(210, size=500), mask=source.random(500) < 0.1), pa.array(user[:500])
    tables = ScoreTables(Scorer.of(whole, "prior"))
    expected = next(iter(tables.of(_Given(*given))))
    with one_thread():
        found, counts = _score(last, *given, "prior")
    assert (found, counts) == (expected, tables.counts)

    _, wanted = recommendations(whole, 20)
    group = list(batches(range(200), 20))
    with one_thread():
        parts = [_rank(worker, group, 20, SEEN) for worker in workers]
        merged = _merge(last, group, 20, True, *parts)
    assert [table for _, table in merged] == list(wanted)


class _Given:
    """A source of one batch."""

    def __init__(self, user: pa.Array, item: pa.Array) -> None:
        self.parts: list[Any] = [None]
        self._pairs = user, item

    def identity(self) -> list[Any]:
        return []

    def read(self, part: Any, users: Any, items: Any) -> Any:
        from invdist.serving.inputs import match

        yield match(*self._pairs, users, items)


def test_a_worker_reads_and_holds_its_rows_only(run_of: Callable[[str], Path]) -> None:
    whole, workers = open_run(run_of("vectors")), _workers(run_of("vectors"), 3)
    assert [len(worker.slice.table("user")) for worker in workers] == [67, 67, 66]
    np.testing.assert_array_equal(workers[1].slice.table("user").numpy(), whole.model.user[67:134].numpy())
    assert [len(worker.slice.table("item")) for worker in workers] == [300, 0, 0]  # a tile is not divided
    assert (
        workers[2].run.users.take(np.array([199, 0, 199])).to_pylist()
        == whole.users.raw.take([199, 0, 199]).to_pylist()
    )


def test_seen_pairs_of_a_range_of_items(run_of: Callable[[str], Path]) -> None:
    dataset = open_run(run_of("gmf")).dataset
    users = np.array([5, 0, 199])
    place, item = SeenPairs.read(dataset, SEEN).of(users)
    some_place, some_item = SeenPairs.read(dataset, SEEN, 100, 200).of(users)
    mine = (item >= 100) & (item < 200)
    np.testing.assert_array_equal(some_place, place[mine])
    np.testing.assert_array_equal(some_item, item[mine])
    assert 0 < len(some_item) < len(item)
