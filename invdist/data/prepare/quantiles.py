"""Exact order statistics of a column that does not fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

_SIGN = np.uint64(1 << 63)


def order_statistics(chunks: Callable[[], Iterable[np.ndarray]], ranks: Sequence[int]) -> list[float | int]:
    """The values at the given ranks (0: smallest) of a column of float64 without NaN, or of int64.

    `chunks()` gives the column piece by piece and is called four times.
    """
    dtype: np.dtype = np.dtype(np.float64)

    def count(shift: int, prefixes: Sequence[int]) -> np.ndarray:
        nonlocal dtype
        counts = np.zeros((len(prefixes), 1 << 16), np.int64)
        for chunk in chunks():
            dtype = chunk.dtype
            counts += digit_counts(chunk, shift, prefixes)
        return counts

    prefixes = find_prefixes(count, ranks)
    return values_of(prefixes, dtype)


def find_prefixes(count: Callable[[int, Sequence[int]], np.ndarray], ranks: Sequence[int]) -> list[int]:
    """The words (see `values_of`) at the given ranks of a column that only `count` sees, in one place or in many.

    `count(shift, prefixes)` is the sum of `digit_counts` over the column. It is called four times: each call finds 16
    more bits of every answer, so memory does not depend on the number of rows.
    """
    prefixes = [0] * len(ranks)
    remaining = list(ranks)
    for shift in (48, 32, 16, 0):
        for i, found in enumerate(count(shift, tuple(prefixes))):
            cumulative = np.cumsum(found)
            digit = int(np.searchsorted(cumulative, remaining[i], side="right"))
            if digit == 1 << 16:
                raise IndexError(f"rank {ranks[i]} of {cumulative[-1]} values")
            remaining[i] -= int(cumulative[digit - 1]) if digit else 0
            prefixes[i] = (prefixes[i] << 16) | digit
    return prefixes


def digit_counts(chunk: np.ndarray, shift: int, prefixes: Sequence[int]) -> np.ndarray:
    """How often each 16-bit digit at `shift` follows each prefix among some values (int64 [prefixes, 65536])."""
    words = _ordered(chunk)
    digits = ((words >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64)
    counts = np.empty((len(prefixes), 1 << 16), np.int64)
    for i, prefix in enumerate(prefixes):
        fits = digits if shift == 48 else digits[(words >> np.uint64(shift + 16)) == np.uint64(prefix)]
        counts[i] = np.bincount(fits, minlength=1 << 16)
    return counts


def values_of(words: Sequence[int], dtype: np.dtype) -> list[float | int]:
    """The values that the words of `find_prefixes` mean."""
    return _unordered(np.array(words, np.uint64), dtype).tolist()


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
