"""Dynamic batching: while one batch is computed, the requests that arrive form the next."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

MOST_ROWS = 1 << 14
_FEW_ROWS = 1 << 12
"""A batch up to this size is computed between two events: a thread would wait longer for Python's lock."""


class _Waiting(NamedTuple):
    user: np.ndarray
    item: np.ndarray
    result: asyncio.Future[np.ndarray]


class Batcher:
    """Scores the pairs of all waiting requests at once, many of them in a thread, in the order they came.

    Nobody waits for a batch to fill: alone, a request is a batch of its own. `on_batch` gets the rows of each.
    """

    def __init__(
        self,
        score: Callable[[np.ndarray, np.ndarray], np.ndarray],
        pool: ThreadPoolExecutor,
        on_batch: Callable[[int], None] = lambda rows: None,
    ) -> None:
        self._score, self._pool, self._on_batch = score, pool, on_batch
        self._waiting: deque[_Waiting] = deque()
        self._task: asyncio.Task[None] | None = None

    async def score(self, user: np.ndarray, item: np.ndarray) -> np.ndarray:
        """Scores of pairs of indices (int64)."""
        if not len(user):
            return np.empty(0, np.float32)
        loop = asyncio.get_running_loop()
        waiting = _Waiting(user, item, loop.create_future())
        self._waiting.append(waiting)
        if self._task is None:
            self._task = loop.create_task(self._run())
        return await waiting.result

    async def _run(self) -> None:
        try:
            while self._waiting:
                if batch := self._next_batch():
                    await self._compute(batch)
        finally:
            self._task = None

    async def _compute(self, batch: list[_Waiting]) -> None:
        user, item = (np.concatenate(column) for column in list(zip(*batch, strict=True))[:2])
        self._on_batch(len(user))
        try:
            if len(user) <= _FEW_ROWS:
                scores = self._score(user, item)
            else:
                scores = await asyncio.get_running_loop().run_in_executor(self._pool, self._score, user, item)
        except Exception as error:
            for waiting in batch:
                if not waiting.result.done():
                    waiting.result.set_exception(error)
            return
        start = 0
        for waiting in batch:
            end = start + len(waiting.user)
            if not waiting.result.done():
                waiting.result.set_result(scores[start:end])
            start = end

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        rows = 0
        while self._waiting and (not batch or rows + len(self._waiting[0].user) <= MOST_ROWS):
            waiting = self._waiting.popleft()
            if not waiting.result.done():  # its request may have timed out
                batch.append(waiting)
                rows += len(waiting.user)
        return batch
