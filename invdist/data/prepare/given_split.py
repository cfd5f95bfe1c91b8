"""A split given by two files: the (user, item) pairs of validation and of test."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from invdist.data.prepare.readers import open_stream
from invdist.data.prepare.splitting import TEST, VALID, by_given
from invdist.data.sorted_sets import contains
from invdist.runtime.errors import UserError
from invdist.runtime.paths import AnyPath

FindIds = Callable[[list[str]], np.ndarray]
"""From ids written as text to their final indices (int64), -1 for ids that the log does not have."""
_DELIMITERS = (b"\t", b"::", b",")


class GivenSplit:
    """Pairs of two files (plain or gzip, one pair per line, further fields ignored); every other row is train."""

    def __init__(self, valid: AnyPath, test: AnyPath) -> None:
        self._pairs = {VALID: _read_pairs(valid), TEST: _read_pairs(test)}
        self._paths = {VALID: valid, TEST: test}
        self._keys: dict[int, np.ndarray] = {}
        self._found: dict[int, int] = {}

    def resolve(self, find_users: FindIds, find_items: FindIds, items: int) -> None:
        """Turns raw pairs into sorted keys `user * items + item`; every pair must be in the log."""
        for part, (users, raw_items) in self._pairs.items():
            user, item = find_users(users), find_items(raw_items)
            unknown = np.flatnonzero((user < 0) | (item < 0))
            if len(unknown):
                self._fail(part, int(unknown[0]), len(unknown))
            keys = user.astype(np.uint64) * np.uint64(items) + item.astype(np.uint64)
            self._keys[part], first = np.unique(keys, return_index=True)
            if len(first) < len(keys):
                raise UserError(f"{self._paths[part]}: {len(keys) - len(first)} pairs are in it more than once")
            self._found[part] = 0
        both = contains(self._keys[VALID], self._keys[TEST])
        if both.any():
            count = np.count_nonzero(both)
            raise UserError(f"{self._paths[VALID]} and {self._paths[TEST]} share {count} pairs; a row has one split")

    def split(self, pair: np.ndarray) -> np.ndarray:
        """The split (int8) of labeled pairs (uint64 keys, each once)."""
        return by_given(pair, self._keys[VALID], self._keys[TEST])

    def note(self, split: np.ndarray) -> np.ndarray:
        """Counts the pairs of a `split` as found, and gives it back."""
        for part in self._found:
            self._found[part] += int(np.count_nonzero(split == part))
        return split

    def check_all_found(self) -> None:
        """Raises `UserError` if a given pair was not among the labeled rows."""
        for part, found in self._found.items():
            if missing := len(self._keys[part]) - found:
                raise UserError(f"{self._paths[part]}: {missing} pairs are unclear in the log and cannot be tested on")

    def _fail(self, part: int, row: int, count: int) -> None:
        user, item = (column[row] for column in self._pairs[part])
        raise UserError(
            f"{self._paths[part]}: line {row + 1}: user {user}, item {item} is not in the log ({count} such pairs)"
        )


def _read_pairs(path: AnyPath) -> tuple[list[str], list[str]]:
    try:
        with open_stream(path) as file:
            lines = file.read().splitlines()
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"cannot read the given split {path}: {error}") from error
    if not lines:
        raise UserError(f"{path} is empty; expected one pair of user and item per line")
    delimiter = next((mark for mark in _DELIMITERS if mark in lines[0]), None)
    users, items = [], []
    for number, line in enumerate(lines, 1):
        fields = line.split(delimiter)
        if len(fields) < 2:
            raise UserError(f"{path}: line {number}: expected user and item, separated by tab, comma or ::")
        users.append(fields[0].decode().strip())
        items.append(fields[1].decode().strip())
    return users, items
