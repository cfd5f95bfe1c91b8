"""Exact order statistics of a column that does not fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

_SIGN = np.uint64(1 << 63)


def order_statistics(chunks: Callable[[], Iterable[np.ndarray]], ranks: Sequence[int]) -> list[float | int]:
    """The values at the given ranks (0: smallest) of a column of float64 without NaN, or of int64.

    `chunks()` gives the column piece by piece and is called four times: each pass finds 16 more bits of every
    answer by counting, so memory does not depend on the number of rows.
    """
    prefixes = [0] * len(ranks)
    remaining = list(ranks)
    dtype: np.dtype = np.dtype(np.float64)
    for shift in (48, 32, 16, 0):
        counts = [np.zeros(1 << 16, np.int64) for _ in ranks]
        for chunk in chunks():
            dtype = chunk.dtype
            words = _ordered(chunk)
            digits = ((words >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64)
            for count, prefix in zip(counts, prefixes):
                fits = digits if shift == 48 else digits[(words >> np.uint64(shift + 16)) == np.uint64(prefix)]
                count += np.bincount(fits, minlength=1 << 16)
        for i, count in enumerate(counts):
            cumulative = np.cumsum(count)
            digit = int(np.searchsorted(cumulative, remaining[i], side="right"))
            if digit == 1 << 16:
                raise IndexError(f"rank {ranks[i]} of {cumulative[-1]} values")
            remaining[i] -= int(cumulative[digit - 1]) if digit else 0
            prefixes[i] = (prefixes[i] << 16) | digit
    values = _unordered(np.array(prefixes, np.uint64), dtype)
    return values.tolist()


def _ordered(values: np.ndarray) -> np.ndarray:
    """Words (uint64) that compare as the values do."""
    words = values.astype(values.dtype.newbyteorder("="), copy=True).view(np.uint64)
    if values.dtype.kind == "i":
        return words ^ _SIGN
    negative = (words & _SIGN) != 0
    return np.where(negative, ~words, words | _SIGN)


def _unordered(words: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype.kind == "i":
        return (words ^ _SIGN).view(np.int64)
    negative = (words & _SIGN) == 0
    return np.where(negative, ~words, words & ~_SIGN).view(np.float64)
