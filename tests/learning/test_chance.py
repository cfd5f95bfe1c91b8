"""What chance gives to singular values: compared with exposures by popularity, and with ones whose cause is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from invdist.learning.chance import Shares, edge_of_chance, histogram, shares, without_chance

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
