"""Means over seeds, and whether the best is really ahead of the next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation; the deviation of a single value is not known."""

    mean: float
    deviation: float | None

    def __str__(self) -> str:
        if self.deviation is None:
            return f"{self.mean:.4f}"
        return f"{self.mean:.4f} ± {self.deviation:.4f}"


def spread(values: Sequence[float]) -> Spread | None:
    """The spread of values over seeds; None without values."""
    if not values:
        return None
    return Spread(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)


@dataclass(frozen=True)
class Paired:
    """The difference of two rows over the seeds that both have."""

    difference: float
    p: float | None
    """Two-sided, of a paired t-test; None with fewer than two seeds."""
    seeds: int


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> Paired | None:
    """Holds values by seed against others; None where they have no seed in common."""
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    a, b = (np.array([values[seed] for seed in seeds]) for values in (first, second))
    difference = a - b
    mean = float(difference.mean())
    if len(seeds) < 2:
        return Paired(mean, None, len(seeds))
    if math.isclose(float(difference.std()), 0, abs_tol=1e-12):
        # Without spread the t-test divides by zero: equal everywhere, or ahead by the same everywhere.
        return Paired(mean, 1.0 if abs(mean) < 1e-12 else 0.0, len(seeds))
    return Paired(mean, float(stats.ttest_rel(a, b).pvalue), len(seeds))
