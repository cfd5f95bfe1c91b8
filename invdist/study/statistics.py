"""Means over seeds, and whether one row is significantly ahead of another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation, which a single value does not have."""

    mean: float
    deviation: float | None

    def __str__(self) -> str:
        return f"{self.mean:.4f}" if self.deviation is None else f"{self.mean:.4f} ± {self.deviation:.4f}"


def spread(values: Sequence[float]) -> Spread | None:
    """The spread of values over seeds; None without values."""
    if not values:
        return None
    return Spread(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)


@dataclass(frozen=True)
class Paired:
    """The mean difference of two rows over the seeds that both have."""

    difference: float
    p: float | None
    """Two-sided, of a paired t-test; None with fewer than two seeds."""
    seeds: int


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> Paired | None:
    """Compares two rows, given as values by seed; None if they have no seed in common."""
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    difference = np.array([first[seed] - second[seed] for seed in seeds])
    mean, p = float(difference.mean()), None
    if len(seeds) > 1 and np.ptp(difference) < 1e-12:
        # Without spread the t-test divides by zero: equal for all seeds, or ahead by the same for all.
        p = 1.0 if abs(mean) < 1e-12 else 0.0
    elif len(seeds) > 1:
        p = float(stats.ttest_rel(difference, np.zeros(len(seeds))).pvalue)
    return Paired(mean, p, len(seeds))
