"""Readers as Ray actors: who is asked for which block, where they are, and that they may die."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from invdist.data.stream import blocks
from invdist.data.stream.batches import Stream, ray_readers
from invdist.data.stream.node_parts import NodeParts
from tests.data.stream.test_batches import digest, spec_of


def test_ray_readers_give_the_same_and_survive_a_kill(tiny: Path, ray_cluster):
    import ray

    # 131,328 rows a step: two steps a block, so that the readers are asked for many blocks.
    spec = spec_of(tiny, batch_size=256, unlabeled_per_row=512, window_rows=500, source="mix")
    expected = list(Stream(spec, 0, 1).epoch(1))
    here = ray.get_runtime_context().get_node_id()
    readers = ray_readers(spec, 2, [here, here, "0" * len(here)])  # a node that Ray does not know is this one
    assert len(readers.parts) == 2  # each has the observed pairs of half of the users
    assert readers.of_nodes.keys() == {0, 1}
    ranks = [Stream(spec, rank, 3, readers=readers, prefetch=2).epoch(1, start_step=3) for rank in range(3)]
    found = []
    for step, parts in enumerate(zip(*ranks), start=3):
        found += parts
        if step in (5, 8):
            ray.kill(readers[step % 2], no_restart=False)
        if step in (6, 8):
            ray.kill(readers.parts[step % 4 // 2], no_restart=False)
        if step == 7:
            ray.kill(readers.of_nodes[0], no_restart=False)
        if step == 10:  # all at once: nobody but the holder of `readers` knows the parts then
            for actor in (*readers, *readers.parts, readers.of_nodes[0]):
                ray.kill(actor, no_restart=False)
    assert digest(found) == digest(expected[3:])


@pytest.mark.parametrize("count", [1, 2])
def test_what_was_fetched_ahead_is_used_by_the_next_epoch(tiny: Path, ray_cluster, monkeypatch, count: int):
    asked: list[tuple[int, int]] = []
    ask = Stream._ask
    monkeypatch.setattr(Stream, "_ask", lambda self, *place: asked.append(place) or ask(self, *place))
    spec = spec_of(tiny, batch_size=256, unlabeled_per_row=512, window_rows=500, source="mix")
    alone, stream = Stream(spec, 0, 1), Stream(spec, 0, 1, readers=ray_readers(spec, count), prefetch=2)
    blocks, at = alone._maker.blocks, 3 // alone._maker.steps_per_block
    assert blocks > stream._prefetch + 1
    begun = list(itertools.islice(stream.epoch(0, next_start=0), 3))  # as a phase that takes a part of a pass
    assert digest(begun) == digest(list(alone.epoch(0))[:3])
    assert digest(list(stream.epoch(0, 4, next_start=3))) == digest(list(alone.epoch(0))[4:])
    assert digest(list(stream.epoch(1, 3))) == digest(list(alone.epoch(1))[3:])
    assert asked == [(0, block) for block in range(blocks)] + [(1, block) for block in range(at, blocks)]
    assert not stream._asked
    # What is not wanted any more is dropped.
    next(stream.epoch(2))
    assert stream._asked
    assert digest(list(stream.epoch(0))) == digest(list(alone.epoch(0)))
    assert not stream._asked


@pytest.mark.parametrize("readers", [1, 2, 3, 8])
@pytest.mark.parametrize(("window_rows", "unlabeled"), [(64, 0), (512, 1), (1024, 3), (2048, 7), (700, 1)])
def test_every_reader_is_at_work(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, readers: int, window_rows: int, unlabeled: int
):
    monkeypatch.setattr(blocks, "_BLOCK_ROWS", 128)
    monkeypatch.setattr(blocks, "_AHEAD_BLOCKS", 16)
    spec = spec_of(tiny, batch_size=16, unlabeled_per_row=unlabeled, window_rows=window_rows)
    stream = Stream(spec, 0, 1, readers=[None] * readers, prefetch=2)
    maker = stream._maker
    assert stream._prefetch >= (readers if readers > 1 else 2)
    assert stream._prefetch <= max(16, readers, 2)
    makers = [maker.reader_of(block) for block in range(maker.blocks)]
    ragged = maker.stripe  # a window that blocks do not divide ends with a shorter stripe
    for start in range(maker.blocks - stream._prefetch - ragged):
        assert set(makers[start : start + stream._prefetch + ragged]) == set(range(readers))
    # A window is read by few readers: no more than it has stripes.
    size = maker.steps_per_block * spec.batch_size
    by_window: dict[int, set[int]] = {}
    for block, reader in enumerate(makers):
        by_window.setdefault(block * size // window_rows, set()).add(reader)
    per_window = -(-window_rows // size)
    assert max(map(len, by_window.values())) <= -(-per_window // maker.stripe) + (window_rows < size)


def test_readers_are_where_they_are_told_or_elsewhere_if_that_is_lost(tiny: Path, ray_cluster):
    import ray

    here = ray.get_runtime_context().get_node_id()
    spec = spec_of(tiny, batch_size=256)
    for nodes in ([here], ["0" * len(here)]):
        readers = ray_readers(spec, 2, nodes)
        part: Any = ray.get(readers[1].part.remote(0, 0, 0, 1), timeout=300)
        assert len(part["user"]) > 0


@pytest.mark.slow
def test_actors_are_beside_their_ranks(tiny: Path, repository: Path):
    """On two nodes. Ray puts actors that need no resources anywhere."""
    command = [sys.executable, str(Path(__file__).with_name("two_nodes.py")), str(tiny)]
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr


class CountingMaker(blocks.BlockMaker):
    """A reader that tells which requests it had: the block, and the ranks it was asked for."""

    asked: list[tuple[int, tuple[int, ...]]]

    def parts(self, epoch: int, block: int, ranks: Any, world_size: int) -> Any:
        found = super().parts(epoch, block, ranks, world_size)
        self.asked = [*self.asked[: -len(ranks)], (block, tuple(ranks))]  # which asked for them one by one
        return found

    def part(self, epoch: int, block: int, rank: int, world_size: int) -> Any:
        self.asked = [*getattr(self, "asked", []), (block, (rank,))]
        return super().part(epoch, block, rank, world_size)

    def requests(self) -> list[tuple[int, tuple[int, ...]]]:
        return self.asked


def test_a_node_asks_once_for_a_block(tiny: Path, ray_cluster, monkeypatch: pytest.MonkeyPatch):
    """Five ranks: two on each of two nodes, one alone on a third. Nodes that Ray does not know are this one."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    spec = spec_of(tiny, batch_size=256, unlabeled_per_row=512, window_rows=500, source="exposures")
    with monkeypatch.context() as patched:
        patched.setattr("invdist.data.stream.batches.BlockMaker", CountingMaker)
        # The ranks of a node need not be in a row.
        readers = ray_readers(spec, 2, [here, "0" * len(here), here, "0" * len(here), "1" * len(here)])
    streams = [Stream(spec, rank, 5, readers=readers, prefetch=2) for rank in range(5)]
    found = [part for step in zip(*(stream.epoch(1) for stream in streams)) for part in step]
    assert digest(found) == digest(list(Stream(spec, 0, 1).epoch(1)))
    asked = [request for reader in readers for request in ray.get(reader.requests.remote())]
    blocks_read = range(streams[0]._maker.blocks)
    assert len(blocks_read) > 5
    assert sorted(asked) == sorted((block, ranks) for block in blocks_read for ranks in ((0, 2), (1, 3), (4,)))


def test_ranks_of_one_node_ask_the_readers(tiny: Path, ray_cluster):
    """The readers are on the same node then: nothing travels."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    assert not ray_readers(spec_of(tiny), 1, [here, here]).of_nodes


def test_a_node_keeps_a_block_until_its_ranks_have_it(monkeypatch: pytest.MonkeyPatch):
    async def answer(block: int) -> dict[int, int]:
        return {0: block, 1: -block}

    class Parts:
        def remote(self, epoch: int, block: int, *_: Any) -> Any:
            return asyncio.ensure_future(answer(block))

    class Reader:
        parts = Parts()

    async def ask() -> None:
        node = NodeParts([Reader()], [0, 1], 2)
        assert [await node.part(0, 0, 7, rank) for rank in (0, 1)] == [7, -7]
        assert not node._fetched
        monkeypatch.setattr("invdist.data.stream.node_parts._KEPT_BLOCKS", 3)
        for block in range(9):  # a rank that never comes
            assert await node.part(0, 0, block, 0) == block
        assert [block for _, block in node._fetched] == [6, 7, 8]

    asyncio.run(ask())
