"""Splits rows into train, valid and test: by exact shares, by time, by date, or by given lists of pairs."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import numpy as np

from invdist.data.sorted_sets import contains

TRAIN, VALID, TEST = 0, 1, 2


class Shares:
    """Cuts a sequence of rows, given piece by piece, into parts of stated fractions.

    After any number of rows the parts hold the rounded cumulative fractions of them. Rows come in random order, so a
    cut by position is a random cut.
    """

    def __init__(self, fractions: Sequence[float]) -> None:
        self._bounds = np.cumsum(fractions)
        self._bounds[-1] = 1.0
        self._seen = 0
        self._given = np.zeros(len(fractions), np.int64)

    def cut(self, rows: int) -> np.ndarray:
        """The part (int8) of each of the next `rows` rows."""
        take = self.take(rows)
        return np.repeat(np.arange(len(take), dtype=np.int8), take)

    def take(self, rows: int) -> np.ndarray:
        """How many (int64) of the next `rows` rows each part gets: the first ones go to the first part, and so on."""
        self._seen += rows
        upto = np.floor(self._seen * self._bounds + 0.5).astype(np.int64)
        target = np.diff(upto, prepend=0)
        # Rounding may ask one part to give a row back; it keeps it and the next part waits.
        take = np.maximum(target - self._given, 0)
        while (excess := int(take.sum()) - rows) > 0:
            largest = int(np.argmax(take))
            take[largest] -= min(excess, int(take[largest]))
        self._given += take
        return take


def by_time(time: np.ndarray, train_until: int, valid_until: int) -> np.ndarray:
    """The split (int8) of rows by when they happened: train up to a time, valid up to another, test after it."""
    return np.where(time <= train_until, TRAIN, np.where(time <= valid_until, VALID, TEST)).astype(np.int8)


def day_number(date: str) -> int:
    """Days from 1970-01-01 to a date written YYYY-MM-DD; `ValueError` if it is none."""
    return (datetime.date.fromisoformat(date) - datetime.date(1970, 1, 1)).days


def by_given(pair: np.ndarray, valid: np.ndarray, test: np.ndarray) -> np.ndarray:
    """The split (int8) of pairs (uint64 keys) by two sorted lists of keys; what is in neither is train."""
    split = np.full(len(pair), TRAIN, np.int8)
    split[contains(valid, pair)] = VALID
    split[contains(test, pair)] = TEST
    return split
