"""Sets of integers as sorted arrays. NumPy's `unique` and `isin` hash, which is many times slower on pair keys."""

from __future__ import annotations

import numpy as np


def sorted_set(values: np.ndarray) -> np.ndarray:
    """The distinct values, sorted."""
    ordered = np.sort(values)
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])] if len(ordered) else ordered


def contains(members: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Which of `values` are in the sorted array `members` (bool)."""
    if not len(members):
        return np.zeros(len(values), bool)
    at = np.minimum(np.searchsorted(members, values), len(members) - 1)
    return members[at] == values
