"""Pairs that were never observed, for given users: uniform or by popularity, with exact exclusion."""

from __future__ import annotations

import numpy as np

from invdist.data import hashing
from invdist.data.sorted_sets import sorted_set
from invdist.data.stream.observed import ObservedPairs
from invdist.runtime.errors import UserError

_ROUNDS = 12


class Sampler:
    """Draws items that were never observed with the given user, with a chance ~ count^popularity (0: uniform).

    Every draw is a hash of (seed, position): the same positions give the same items, in any grouping. Draws that hit
    an observed pair are repeated at most 12 times; what is still left (users who have seen nearly everything) is drawn
    from the listed unseen items of the user, with the same chances. A user who has seen *everything* has nothing to
    draw: the row goes to the next user (by index, cyclically) who has; `saturated_users` counts such users.
    """

    def __init__(
        self, observed: ObservedPairs, seed: int, popularity: float = 0.0, counts: np.ndarray | None = None
    ) -> None:
        """`counts` are how often each item was observed, if `observed` has only a part of the pairs: then no user of
        `sample` may be saturated."""
        self.observed = observed
        self._key = hashing.key(seed, "sampler")
        self._substitute = None
        if counts is None:
            self.saturated_users = len(observed.saturated)
            self._substitute = substitutes(observed.saturated, observed.users, observed.items)
            counts = item_counts(observed)
        self._cdf: np.ndarray | None = None
        if popularity > 0:
            # One is added to every count: an item never shown can be drawn too.
            weight = (counts + 1.0) ** popularity
            cdf = np.cumsum(weight)
            cdf /= cdf[-1]
            # Where to start looking, for each of many equal slices of [0, 1): one step replaces a long search.
            self._guide = np.searchsorted(cdf, np.linspace(0, 1, 2 * observed.items, endpoint=False), "right")
            self._cdf = cdf

    def sample(self, user: np.ndarray, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(user, item), int64, one unobserved pair for each entry of `user`; `position` (uint64) is its number."""
        user = user.astype(np.int64)
        if self._substitute is not None:
            user = self._substitute[user]
        item = self._draw(position, 0)
        pending = np.flatnonzero(self.observed.contains(user, item))
        for attempt in range(1, _ROUNDS):
            if not len(pending):
                break
            again = self._draw(position[pending], attempt)
            item[pending] = again
            pending = pending[self.observed.contains(user[pending], again)]
        if len(pending):
            item[pending] = self._from_unseen(user[pending], position[pending])
        return user, item

    def _draw(self, position: np.ndarray, attempt: int) -> np.ndarray:
        chance = hashing.uniform(hashing.mix(self._key + attempt, position))
        if self._cdf is None:
            return (chance * self.observed.items).astype(np.int64)
        item = self._guide[(chance * len(self._guide)).astype(np.int64)]
        pending = np.flatnonzero(self._cdf[item] <= chance)
        while len(pending):
            item[pending] += 1
            pending = pending[self._cdf[item[pending]] <= chance[pending]]
        return item

    def _from_unseen(self, user: np.ndarray, position: np.ndarray) -> np.ndarray:
        chance = hashing.uniform(hashing.mix(self._key + _ROUNDS, position))
        item = np.empty(len(user), np.int64)
        unseen = np.ones(self.observed.items, bool)
        for one in sorted_set(user):
            rows = np.flatnonzero(user == one)
            seen = self.observed.seen_by(one)
            unseen[seen] = False
            candidates = np.flatnonzero(unseen)
            unseen[seen] = True
            if self._cdf is None:
                item[rows] = candidates[(chance[rows] * len(candidates)).astype(np.int64)]
            else:
                weight = np.cumsum(np.diff(self._cdf, prepend=0.0)[candidates])
                at = np.searchsorted(weight, chance[rows] * weight[-1], side="right")
                item[rows] = candidates[np.minimum(at, len(candidates) - 1)]
        return item


def item_counts(observed: ObservedPairs) -> np.ndarray:
    """How many users each item was observed with (int64)."""
    return np.bincount(observed.seen, minlength=observed.items)


def substitutes(saturated: np.ndarray, users: int, items: int) -> np.ndarray | None:
    """For each user the next one who has unseen items (int64), or None when every user has."""
    if not len(saturated):
        return None
    if len(saturated) == users:
        raise UserError(
            f"all {users} x {items} pairs were observed: there is nothing to sample; use unlabeled.source=exposures"
        )
    everyone = np.arange(users)
    open_users = np.delete(everyone, saturated)
    return open_users[np.searchsorted(open_users, everyone) % len(open_users)]
