"""The pairs that training has observed, so that none of them is ever drawn as unobserved."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from invdist.data.dataset import Dataset
from invdist.data.schema import OBSERVED_SPLITS
from invdist.data.sorted_sets import sorted_set

_FIBONACCI = np.uint64(0x9E3779B97F4A7C15)
_BITS_PER_PAIR = 32


class ObservedPairs:
    """An exact set of (user, item) pairs, about 8 bytes each.

    The items of each user are sorted in one array. A bitmap of hashed pairs answers first: nearly every pair that is
    not in the set (all but 1 in 32 to 64) costs one memory access instead of a search.
    """

    def __init__(self, user: np.ndarray, item: np.ndarray, users: int, items: int) -> None:
        self.users, self.items = users, items
        pair = sorted_set(user.astype(np.int64) * items + item)
        self.seen = (pair % items).astype(np.int32)
        self.offsets = np.searchsorted(pair, np.arange(users + 1, dtype=np.int64) * items)
        bits = max(10, int(len(pair) * _BITS_PER_PAIR).bit_length())
        self._shift = np.uint64(64 - bits)
        self._bitmap = np.zeros(1 << (bits - 3), np.uint8)
        place = self._place(pair)
        for bit in range(8):
            self._bitmap[place[(place & 7) == bit] >> 3] |= np.uint8(1 << bit)

    @property
    def saturated(self) -> np.ndarray:
        """Users (int64) who have observed every item."""
        return np.flatnonzero(np.diff(self.offsets) >= self.items)

    @classmethod
    def part(cls, dataset: Dataset, part: int, parts: int) -> ObservedPairs:
        """The pairs of users `part`, `part + parts`, ..., who are 0, 1, ... in it."""
        own: list[tuple[np.ndarray, np.ndarray]] = [(np.empty(0, np.int32), np.empty(0, np.int32))]
        for split in OBSERVED_SPLITS:
            for batch in dataset.scan(split, ["user", "item"]):
                user, item = batch["user"].to_numpy(), batch["item"].to_numpy()
                mine = user % parts == part
                own.append((user[mine] // parts, item[mine]))
        user, item = (np.concatenate([column[n] for column in own]) for n in range(2))
        return cls(user, item, len(range(part, dataset.users, parts)), dataset.items)

    @classmethod
    def of(cls, dataset: Dataset, splits: Sequence[str] = OBSERVED_SPLITS) -> ObservedPairs:
        """The pairs of a data set's training splits."""
        tables = [dataset.read(split, ["user", "item"]) for split in splits]
        user, item = (np.concatenate([table[name].to_numpy() for table in tables]) for name in ("user", "item"))
        return cls(user, item, dataset.users, dataset.items)

    def seen_by(self, user: int) -> np.ndarray:
        """The items (int32, sorted) observed with one user."""
        return self.seen[self.offsets[user] : self.offsets[user + 1]]

    def contains(self, user: np.ndarray, item: np.ndarray) -> np.ndarray:
        """Which pairs are in the set (bool); `user` and `item` are int64."""
        place = self._place(user * self.items + item)
        found = (self._bitmap[place >> 3] >> (place & 7).astype(np.uint8)) & np.uint8(1) != 0
        maybe = np.flatnonzero(found)
        found[maybe] = self._search(user[maybe], item[maybe])
        return found

    def _place(self, pair: np.ndarray) -> np.ndarray:
        return ((pair.astype(np.uint64) * _FIBONACCI) >> self._shift).astype(np.int64)

    def _search(self, user: np.ndarray, item: np.ndarray) -> np.ndarray:
        """Binary search of each item among the items of its user, all rows at once."""
        low, end = self.offsets[user].copy(), self.offsets[user + 1]
        high = end.copy()
        while np.any(active := low < high):
            middle = (low + high) // 2
            below = self.seen[np.minimum(middle, len(self.seen) - 1)] < item
            low = np.where(active & below, middle + 1, low)
            high = np.where(active & ~below, middle, high)
        hit = low < end
        hit[hit] = self.seen[low[hit]] == item[hit]
        return hit
