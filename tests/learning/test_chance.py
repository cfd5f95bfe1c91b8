"""What chance gives to singular values: compared with exposures by popularity, and with ones whose cause is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from invdist.learning.chance import Shares, column_weights, edge_of_chance, histogram, shares, without_chance

SMOOTHING = 5.0


def _counted(matrix: np.ndarray) -> tuple[Shares, Shares, float]:
    """What the stage knows of an exposure matrix: how often each user and item was shown."""
    counts = [torch.from_numpy(matrix.sum(axis)) for axis in (1, 0)]
    users, items = (shares(histogram((c := each[each > 0]) / (c + SMOOTHING))) for each in counts)
    return users, items, float(matrix.sum())


def _normalised(matrix: np.ndarray, shown: np.ndarray | None = None) -> np.ndarray:
    shown = matrix if shown is None else shown
    return matrix / np.sqrt(np.outer(shown.sum(1) + SMOOTHING, shown.sum(0) + SMOOTHING))


def _popularity(ids: int, rng: np.random.Generator) -> np.ndarray:
    """Some are far more popular than others."""
    weight = rng.gamma(1.0, size=ids) + 0.2
    return weight / weight.sum()


@pytest.mark.parametrize(("users", "items"), [(900, 700), (2000, 300), (300, 2000)])
def test_by_chance_no_singular_value_but_the_first_is_above_the_edge(users: int, items: int) -> None:
    rng = np.random.default_rng(users)
    shown = rng.poisson(40_000 * np.outer(_popularity(users, rng), _popularity(items, rng))).astype(np.float64)
    singular = np.linalg.svd(_normalised(shown), compute_uv=False)
    edge = edge_of_chance(*_counted(shown))
    assert singular[0] > 1.5 * edge
    assert singular[1] == pytest.approx(edge, rel=0.03)


def test_what_is_left_is_nearer_to_the_cause() -> None:
    """Groups that are shown their own items more often: exposures are drawn from a matrix that is known here."""
    rng = np.random.default_rng(0)
    users, items, groups = 800, 500, 24
    size = rng.dirichlet(np.full(groups, 3.0))
    group = [rng.choice(groups, n, p=size) for n in (users, items)]
    cause = np.outer(_popularity(users, rng), _popularity(items, rng)) * np.where(np.equal.outer(*group), 8.0, 0.7)
    cause *= 40_000
    shown = rng.poisson(cause).astype(np.float64)
    left, singular, right = np.linalg.svd(_normalised(shown), full_matrices=False)
    left, singular, right = left[:, :64], singular[:64], right[:64]
    found = without_chance(torch.from_numpy(singular), *_counted(shown)).numpy()
    wanted = _normalised(cause, shown)

    def distance(values: np.ndarray) -> float:
        return float(np.linalg.norm(left * values @ right - wanted))

    best = np.einsum("uk,ui,ki->k", left, wanted, right)  # the nearest that these vectors allow
    cut = min(distance(singular * (np.arange(64) < rank)) for rank in range(1, 65))
    assert 12 < np.count_nonzero(found) <= groups
    assert distance(best) <= distance(found) < 1.05 * distance(best)
    assert distance(found) < 0.95 * cut  # the best number of columns, with their singular values as they are
    assert distance(found) < 0.8 * distance(singular)


def test_ranks_may_count_apart() -> None:
    values = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(histogram(values[:300]) + histogram(values[300:]), histogram(values))
    assert shares(histogram(values)).total == pytest.approx(float(values.sum()))


def test_few_exposures_leave_popularity_alone() -> None:
    shown = np.eye(6)
    singular = torch.from_numpy(np.linalg.svd(_normalised(shown), compute_uv=False))
    found = without_chance(singular, *_counted(shown))
    assert found.isfinite().all()
    assert found[0] == singular[0]
    assert not found[1:].any()


@pytest.mark.parametrize("exposures", [1_000, 2_500, 10_000])
def test_rows_of_length_one_tell_groups_apart_with_any_number_of_exposures(exposures: int) -> None:
    """Users of the same group are nearer to each other than by singular values as they are, and than without chance."""
    rng = np.random.default_rng(1)
    groups = [rng.integers(8, size=n) for n in (400, 250)]
    cause = np.outer(_popularity(400, rng), _popularity(250, rng)) * np.where(np.equal.outer(*groups), 6.0, 0.7)
    shown = rng.poisson(exposures * cause / cause.sum()).astype(np.float64)
    left, values, _ = np.linalg.svd(_normalised(shown), full_matrices=False)
    left, singular = left[:, :32], torch.from_numpy(values[:32])
    pairs = np.triu_indices(len(shown), 1)
    same = np.equal.outer(groups[0], groups[0])[pairs]

    def told_apart(weights: torch.Tensor) -> float:
        rows = left * weights.numpy()
        rows /= np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-12)
        return float(roc_auc_score(same, (rows @ rows.T)[pairs]))

    counted = _counted(shown)
    ends = told_apart(singular), told_apart(without_chance(singular, *counted))
    found = told_apart(column_weights(singular, *counted))
    assert found > max(ends) - 0.002
    assert found > sum(ends) / 2 + 0.01


def test_if_all_is_chance_columns_stay_as_they_are() -> None:
    shown = np.eye(6)
    singular = torch.from_numpy(np.linalg.svd(_normalised(shown), compute_uv=False))
    torch.testing.assert_close(column_weights(singular, *_counted(shown)), singular)


def test_popularity_keeps_its_share_of_the_length() -> None:
    rng = np.random.default_rng(2)
    shown = rng.poisson(np.where(np.arange(90)[:, None] % 3 == np.arange(60) % 3, 1.5, 0.2)).astype(np.float64)
    singular = torch.from_numpy(np.linalg.svd(_normalised(shown), compute_uv=False)[:32])
    counted = _counted(shown)
    found, left = column_weights(singular, *counted), without_chance(singular, *counted)
    assert np.count_nonzero(left) == 3  # popularity, and three groups that are told apart by two columns
    assert found[0] == singular[0]
    assert float(found.norm()) == pytest.approx(float(singular.norm()))
    assert (found[1:3] > singular[1:3]).all()
    assert (found[3:] < singular[3:]).all()
