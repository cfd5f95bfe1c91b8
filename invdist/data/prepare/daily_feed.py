"""A synthetic feed of several days with known truth: tastes drift, new users and items come.

It is the world of `synthetic`, whose users and items arrive one after the other and whose tastes turn a little every
day: on day d a user's factors are those of the day before, moved by `drift` of their length in a random direction and
brought back to their length. Items stay what they are. What is true on a day is in the latent tables of its data set.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from invdist.data.prepare.splitting import day_number
from invdist.data.prepare.synthetic import Scale, SyntheticLog

FIRST_DAY = "2026-01-01"
_DAY_MS = 24 * 3600 * 1000


class DailyFeed(SyntheticLog):
    """The log of `days` days from `FIRST_DAY` on (a `RawLog`), each with its share of the clear rows.

    On the first day a share `arriving` of users and items is not there yet; they come on later days, as many each day.
    Only days up to `upto` (counted from 0) are made, and latent tables are those of that day.
    """

    has_day = True

    def __init__(
        self, name: str, scale: Scale, seed: int, *, days: int, drift: float, arriving: float, upto: int
    ) -> None:
        super().__init__(name, scale, seed)
        self.days, self.drift, self.upto = days, drift, min(upto, days - 1)
        rng = np.random.default_rng([seed, 5])
        self._arrival = {
            entity: np.where(rng.random(size) < arriving, rng.integers(1, max(days, 2), size), 0)
            for entity, size in (("users", scale.users), ("items", scale.items))
        }
        self._tastes = [self.world.user_factors]
        for _ in range(self.upto):
            self._tastes.append(self._moved(rng, self._tastes[-1]))
        self.world.user_factors = self._tastes[self.upto]

    def describe(self) -> dict[str, Any]:
        """The preset, its size, the seed, and how the feed changes."""
        return {**super().describe(), "days": self.days, "drift": self.drift}

    def universe(self) -> None:
        """None: who has not come yet is not there."""
        return

    def pieces(self, rows: int, size: int) -> list[Any]:
        """All days: those of a synthetic feed follow from each other."""
        return [None]

    def read(self, piece: Any) -> Iterator[pa.RecordBatch]:
        """All days."""
        return self.batches()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The exposures of each day, by the tastes of the day."""
        first, at_end = day_number(FIRST_DAY), self.world.user_factors
        for day in range(self.upto + 1):
            rng = np.random.default_rng([self.seed, 6, day])
            self.world.user_factors = self._tastes[day]
            share = self.world.quotas * (self._arrival["users"] <= day) / self.days
            wanted = np.floor(share + rng.random(len(share))).astype(np.int64)
            rows, _ = self._block(rng, 0, wanted, self._arrival["items"] <= day)
            rows |= {name: rows[name].astype(np.int64) for name in ("user", "item")}
            rows["day"] = np.full(len(rows["user"]), first + day)
            rows["time"] = (first + day) * _DAY_MS + rows["time"] % _DAY_MS
            yield pa.RecordBatch.from_pydict(rows)
        self.world.user_factors = at_end

    def _moved(self, rng: np.random.Generator, factors: np.ndarray) -> np.ndarray:
        length = np.linalg.norm(factors, axis=1, keepdims=True)
        step = rng.standard_normal(factors.shape, dtype=np.float32)
        step *= self.drift * length / np.linalg.norm(step, axis=1, keepdims=True)
        moved = factors + step
        return (moved * length / np.linalg.norm(moved, axis=1, keepdims=True)).astype(np.float32)
