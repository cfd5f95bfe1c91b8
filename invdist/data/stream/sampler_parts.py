"""The sampler in parts: each holds the observed pairs of some users, so that no process holds those of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from invdist.data.dataset import Dataset
from invdist.data.stream.observed import ObservedPairs
from invdist.data.stream.sampler import Sampler, item_counts, substitutes


class SamplerPart:
    """A Ray actor that draws for users `part`, `part + parts`, ... What it gives depends on its arguments alone."""

    def __init__(self, path: str, part: int, parts: int, seed: int, popularity: float) -> None:
        self._part, self._parts, self._seed, self._popularity = part, parts, seed, popularity
        self._observed = ObservedPairs.part(Dataset.open(path, verify="fast"), part, parts)
        self._sampler: Sampler | None = None

    def known(self) -> tuple[np.ndarray, np.ndarray]:
        """(users who have observed everything; how often each item was observed, nothing without popularity)."""
        counts = item_counts(self._observed) if self._popularity > 0 else np.empty(0, np.int64)
        return self._observed.saturated * self._parts + self._part, counts

    def sample(self, user: np.ndarray, position: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Items (int64) for users of this part; `counts` are the items' over all parts."""
        if self._sampler is None:
            self._sampler = Sampler(self._observed, self._seed, self._popularity, counts)
        return self._sampler.sample(user // self._parts, position)[1]


class PartedSampler:
    """Draws what one `Sampler` of all pairs would draw, by asking the part that each user is in."""

    def __init__(self, parts: Sequence[Any], users: int, items: int) -> None:
        import ray

        self._parts = list(parts)
        known = ray.get([part.known.remote() for part in self._parts])
        saturated = np.sort(np.concatenate([users_of_part for users_of_part, _ in known]))
        self.saturated_users = len(saturated)
        self._substitute = substitutes(saturated, users, items)
        self._counts = ray.put(sum(counts for _, counts in known))

    def sample(self, user: np.ndarray, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(user, item), int64, one unobserved pair for each entry of `user`; `position` (uint64) is its number."""
        import ray

        user = user.astype(np.int64)
        if self._substitute is not None:
            user = self._substitute[user]
        part = user % len(self._parts)
        rows = [np.flatnonzero(part == number) for number in range(len(self._parts))]
        asked = [
            actor.sample.remote(user[some], position[some], self._counts) for actor, some in zip(self._parts, rows)
        ]
        item = np.empty(len(user), np.int64)
        for some, drawn in zip(rows, ray.get(asked)):
            item[some] = drawn
        return user, item
