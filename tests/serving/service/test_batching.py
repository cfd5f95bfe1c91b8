"""Which requests are scored together, and where."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from invdist.serving.service.batching import MOST_ROWS, Batcher


def test_requests_that_wait_are_one_batch_and_large_ones_do_not_stop_the_others() -> None:
    scored: list[tuple[int, str]] = []

    def score(user: np.ndarray, item: np.ndarray) -> np.ndarray:
        scored.append((len(user), threading.current_thread().name))
        return (10 * user + item).astype(np.float32)

    async def ask(batcher: Batcher, *sizes: int) -> None:
        numbers = [np.arange(size, dtype=np.int64) + size for size in sizes]
        found = await asyncio.gather(*(batcher.score(ids, ids) for ids in numbers))
        for ids, scores in zip(numbers, found, strict=True):
            assert np.array_equal(scores, (11 * ids).astype(np.float32))

    async def main() -> None:
        with ThreadPoolExecutor(1, "pool") as pool:
            batcher = Batcher(score, pool)
            await ask(batcher, 100, 0, 7)
            await ask(batcher, 5000)
            await ask(batcher, MOST_ROWS, 30)

    asyncio.run(main())
    here = threading.current_thread().name
    assert scored == [(107, here), (5000, "pool_0"), (MOST_ROWS, "pool_0"), (30, here)]


def test_a_failure_reaches_every_request_of_its_batch_and_no_other() -> None:
    def score(user: np.ndarray, item: np.ndarray) -> np.ndarray:
        if user.max() > 5:
            raise RuntimeError("no such row")
        return item.astype(np.float32)

    async def main() -> None:
        with ThreadPoolExecutor(1) as pool:
            batcher = Batcher(score, pool)
            ones = np.ones(3, np.int64)
            failed = await asyncio.gather(*(batcher.score(ones * n, ones) for n in (1, 9)), return_exceptions=True)
            assert [str(error) for error in failed] == ["no such row"] * 2
            assert (await batcher.score(ones, ones)).tolist() == [1, 1, 1]

    asyncio.run(main())
