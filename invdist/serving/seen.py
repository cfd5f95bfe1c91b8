"""The pairs that users have seen, of all items or of a range of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from invdist.data.dataset import Dataset
from invdist.data.sorted_sets import sorted_set


class SeenPairs:
    """A set of (user, item) pairs, 8 bytes each, that gives the items of users."""

    def __init__(self, user: np.ndarray, item: np.ndarray, items: int) -> None:
        self._items = items
        self._pairs = sorted_set(user.astype(np.int64) * items + item)

    @classmethod
    def read(cls, dataset: Dataset, splits: Sequence[str], first: int = 0, end: int | None = None) -> SeenPairs:
        """The pairs of splits whose item is in `[first, end)`; the rows of other items are not kept."""
        end = dataset.items if end is None else end
        users, items = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
        for split in splits:
            for batch in dataset.scan(split, ["user", "item"]):
                user, item = (batch[name].to_numpy() for name in ("user", "item"))
                mine = (item >= first) & (item < end)
                users.append(user[mine])
                items.append(item[mine])
        return cls(np.concatenate(users), np.concatenate(items), dataset.items)

    def of(self, users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(place in `users`, item) of every pair of these users (int64)."""
        first, end = (np.searchsorted(self._pairs, (users + more) * self._items) for more in (0, 1))
        count = end - first
        place = np.repeat(np.arange(len(users)), count)
        at = np.arange(len(place)) + np.repeat(first - np.cumsum(count) + count, count)
        return place, self._pairs[at] % self._items

    def contains(self, user: np.ndarray, item: np.ndarray) -> np.ndarray:
        """Which pairs are in the set (bool)."""
        return _place(self._pairs, user.astype(np.int64) * self._items + item) >= 0


def in_splits(dataset: Dataset, splits: Sequence[str], user: np.ndarray, item: np.ndarray) -> np.ndarray:
    """Which pairs are rows of these splits (bool), in memory that grows with the pairs only."""
    distinct, place = np.unique(user.astype(np.int64) * dataset.items + item, return_inverse=True)
    found = np.zeros(len(distinct), bool)
    for split in splits:
        for batch in dataset.scan(split, ["user", "item"]):
            at = _place(distinct, batch["user"].to_numpy().astype(np.int64) * dataset.items + batch["item"].to_numpy())
            found[at[at >= 0]] = True
    return found[place]


def _place(ordered: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Where each value is in an ordered array, -1 if it is not there."""
    at = np.searchsorted(ordered, values)
    there = at < len(ordered)
    there[there] = ordered[at[there]] == values[there]
    return np.where(there, at, -1)
