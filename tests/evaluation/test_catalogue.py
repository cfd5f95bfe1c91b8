"""Metrics of ranked lists against small cases worked out by hand; added up in any division into batches."""

from __future__ import annotations

import numpy as np
import pytest

from invdist.evaluation.catalogue import CatalogueMetrics


def test_two_lists_by_hand() -> None:
    """User A finds item 7 of {7, 1} at rank 2; user B finds nothing of {5}."""
    totals = CatalogueMetrics([2, 3, 2], items=10)
    totals.add(
        first=np.array([0, 3]),
        rank=np.array([1, 2, 3, 1, 2]),
        item=np.array([4, 7, 9, 4, 0]),
        hit=np.array([False, True, False, False, False]),
        relevant=np.array([2, 1]),
    )
    found = totals.metrics()
    gain, best = 1 / np.log2(3), 1 + 1 / np.log2(3)
    at_2 = {"recall@2": 0.25, "hit_rate@2": 0.5, "ndcg@2": gain / best / 2, "mrr@2": 0.25, "coverage@2": 0.3}
    at_3 = {"recall@3": 0.25, "hit_rate@3": 0.5, "ndcg@3": gain / best / 2, "mrr@3": 0.25, "coverage@3": 0.4}
    assert found == pytest.approx({**at_2, **at_3})
    assert next(iter(found)) == "recall@2"
    assert totals.users == 2


def test_a_perfect_list_has_an_ndcg_of_one_even_if_not_all_fit() -> None:
    totals = CatalogueMetrics([2], items=5)
    totals.add(np.array([0]), np.array([1, 2]), np.array([3, 1]), np.array([True, True]), np.array([4]))
    assert totals.metrics() == pytest.approx(
        {"recall@2": 0.5, "hit_rate@2": 1, "ndcg@2": 1, "mrr@2": 1, "coverage@2": 0.4}
    )


def test_batches_add_up() -> None:
    source = np.random.default_rng(0)
    lists = [(source.permutation(50)[:8], source.random(8) < 0.3) for _ in range(40)]

    def metrics(size: int) -> dict[str, float]:
        totals = CatalogueMetrics([3, 8], items=50)
        for start in range(0, len(lists), size):
            batch = lists[start : start + size]
            item, hit = (np.concatenate(column) for column in zip(*batch, strict=True))
            rank = np.tile(np.arange(1, 9), len(batch))
            relevant = np.array([mine.sum() + 1 for _, mine in batch])
            totals.add(np.arange(len(batch)) * 8, rank, item, hit, relevant)
        return totals.metrics()

    assert metrics(1) == pytest.approx(metrics(40))
    assert metrics(7) == pytest.approx(metrics(40))
