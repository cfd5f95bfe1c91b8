"""Means, deviations and the paired test, against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate

from invdist.study.statistics import paired, spread


def _p_by_density(t: float, degrees: int) -> float:
    """Two-sided p of Student's t by integrating its density."""
    scale = math.gamma((degrees + 1) / 2) / (math.sqrt(degrees * math.pi) * math.gamma(degrees / 2))
    inside, _ = integrate.quad(lambda x: scale * (1 + x * x / degrees) ** (-(degrees + 1) / 2), -abs(t), abs(t))
    return 1 - inside


@pytest.mark.parametrize("count", [2, 5, 9])
def test_paired_test_against_the_integral_of_the_density(count: int):
    rng = np.random.default_rng(count)
    a, b = rng.normal(0.75, 0.01, count), rng.normal(0.74, 0.02, count)
    difference = a - b
    t = difference.mean() / (difference.std(ddof=1) / math.sqrt(count))
    found = paired(dict(enumerate(a)), dict(enumerate(b)))
    assert found is not None
    assert found.p == pytest.approx(_p_by_density(t, count - 1), abs=1e-7)
    assert found.difference == pytest.approx(difference.mean())
    assert found.seeds == count


def test_only_common_seeds_are_paired():
    found = paired({0: 0.7, 1: 0.8, 2: 0.9}, {1: 0.7, 2: 0.7, 5: 0.0})
    assert found is not None
    assert (found.seeds, found.difference) == (2, pytest.approx(0.15))
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_without_spread_or_with_one_seed():
    assert paired({0: 0.5, 1: 0.6}, {0: 0.5, 1: 0.6}).p == 1.0  # pyright: ignore[reportOptionalMemberAccess]
    assert paired({0: 0.6, 1: 0.7}, {0: 0.5, 1: 0.6}).p == 0.0  # pyright: ignore[reportOptionalMemberAccess]
    assert paired({0: 0.6}, {0: 0.5}).p is None  # pyright: ignore[reportOptionalMemberAccess]


def test_spread():
    assert spread([]) is None
    assert str(spread([0.5])) == "0.5000"
    assert str(spread([1.0, 2.0, 3.0])) == "2.0000 ± 1.0000"
