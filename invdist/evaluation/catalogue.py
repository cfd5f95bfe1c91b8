"""Metrics of ranked lists over a whole catalogue, added up a batch of users at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class CatalogueMetrics:
    """Sums of metrics over users, for each cut `k` of their lists.

    Of one user with a list of items and some relevant ones: recall is the share of relevant items in the list, hit
    rate whether there is one, NDCG weighs a hit at rank r by 1 / log2(r + 1) and divides by the best that is possible,
    MRR is 1 / rank of the first hit, or 0. Coverage is the share of the catalogue that is in at least one list.
    """

    def __init__(self, ks: Sequence[int], items: int) -> None:
        self.ks = sorted(set(ks))
        self.users = 0
        self._sums = {(name, k): 0.0 for name in ("recall", "hit_rate", "ndcg", "mrr") for k in self.ks}
        self._shown = {k: np.zeros(items, bool) for k in self.ks}
        self._ideal = np.concatenate([[0.0], np.cumsum(1.0 / np.log2(np.arange(self.ks[-1]) + 2.0))])

    def add(self, first: np.ndarray, rank: np.ndarray, item: np.ndarray, hit: np.ndarray, relevant: np.ndarray) -> None:
        """Adds the lists of some users.

        `rank` (from 1), `item` and `hit` (whether the item is relevant) have a row for each item of each list, list
        after list. `first` and `relevant` have an entry for each user: where the list begins, and how many items are
        relevant, at least one.
        """
        self.users += len(first)
        discount = 1.0 / np.log2(rank + 1.0)
        for k in self.ks:
            within = rank <= k
            hits = hit & within
            found = np.add.reduceat(hits.astype(np.int64), first)
            self._sums["recall", k] += float((found / relevant).sum())
            self._sums["hit_rate", k] += int(np.count_nonzero(found))
            gain = np.add.reduceat(np.where(hits, discount, 0.0), first)
            self._sums["ndcg", k] += float((gain / self._ideal[np.minimum(relevant, k)]).sum())
            self._sums["mrr", k] += float(np.maximum.reduceat(np.where(hits, 1.0 / rank, 0.0), first).sum())
            self._shown[k][item[within]] = True

    def metrics(self) -> dict[str, float]:
        """Means over users as `recall@10`, and `coverage@10`, ordered by k."""
        result: dict[str, float] = {}
        for k in self.ks:
            for name in ("recall", "hit_rate", "ndcg", "mrr"):
                result[f"{name}@{k}"] = self._sums[name, k] / self.users if self.users else float("nan")
            result[f"coverage@{k}"] = float(self._shown[k].mean())
        return result
