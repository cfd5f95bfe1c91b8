"""The order in which interactions are read: a function of (seed, splits, pass), readable from any position.

Shards are in random order already (see `prepare.cleaning`). Each pass permutes the row groups of all shards, joins
them, cuts that sequence into windows of `window_rows` rows, and permutes the rows within each window. So a batch
mixes rows of many row groups and shards. A reader holds a window or two, and keeps the row groups it has decoded for
later passes as long as they fit `_DECODED_BYTES`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pyarrow.parquet as pq

from invdist.data import hashing
from invdist.data.dataset import Dataset
from invdist.data.schema import TRAINING_LABELED

_OPEN_FILES = 64
_WINDOWS = 2
_DECODED_BYTES = 64 << 20
"""About 7 M labeled rows. Every pass has another order, so what is kept first is as useful as what is kept last."""


class ShuffledRows:
    """Reads any range of any pass over the rows of `splits`."""

    def __init__(self, dataset: Dataset, splits: Sequence[str], seed: int, window_rows: int) -> None:
        self.dataset = dataset
        self.splits = tuple(splits)
        self.seed = seed
        self.window_rows = window_rows
        replayed = "replay" in dataset.manifest and set(splits) <= set(TRAINING_LABELED)
        self.columns = ["user", "item"] + ["label"] * ("unclear" not in splits) + ["replayed"] * replayed
        self.rows = sum(dataset.rows[split] for split in splits)
        group_rows = dataset.manifest["row_group_rows"]
        self._groups: list[tuple[str, int]] = []
        sizes: list[int] = []
        for split in splits:
            for shard in dataset.shards(split):
                count = -(-shard["rows"] // group_rows)
                self._groups += [(shard["file"], group) for group in range(count)]
                sizes += [group_rows] * (count - 1) + [shard["rows"] - group_rows * (count - 1)] * (count > 0)
        self._sizes = np.array(sizes, np.int64)
        self._files: OrderedDict[str, pq.ParquetFile] = OrderedDict()
        self._windows: OrderedDict[tuple[int, int], dict[str, np.ndarray]] = OrderedDict()
        self._decoded: dict[int, dict[str, np.ndarray]] = {}
        self._decoded_bytes = 0
        self._pass: tuple[int, np.ndarray, np.ndarray] | None = None

    def read(self, number: int, start: int, stop: int) -> dict[str, np.ndarray]:
        """Rows [start, stop) of pass `number`: `user`, `item` (int32), and `label`, `replayed` (int8) if there."""
        pieces = []
        for window in range(start // self.window_rows, -(-stop // self.window_rows)):
            base = window * self.window_rows
            rows = self._window(number, window)
            low, high = max(start - base, 0), stop - base
            pieces.append({name: column[low:high] for name, column in rows.items()})
        if len(pieces) == 1:
            return pieces[0]
        return {
            name: np.concatenate([piece[name] for piece in pieces]) if pieces else np.empty(0, np.int32)
            for name in self.columns
        }

    def _window(self, number: int, window: int) -> dict[str, np.ndarray]:
        if (number, window) in self._windows:
            return self._windows[number, window]
        start = window * self.window_rows
        stop = min(start + self.window_rows, self.rows)
        groups, ends = self._groups_of_pass(number)
        first, last = bisect_right(ends, start), bisect_right(ends, stop - 1)
        begin = int(ends[first - 1]) if first else 0
        tables = self._read_groups(groups[first : last + 1])
        inside = slice(start - begin, stop - begin)
        joined = {name: np.concatenate([table[name] for table in tables])[inside] for name in self.columns}
        if "replayed" in joined:  # in one byte with the label: those three columns are permuted
            joined["label"] = joined["label"] | joined.pop("replayed") << 1
        rows = hashing.shuffled(hashing.key(self.seed, *self.splits, "window", number, window), joined)
        if "replayed" in self.columns:
            rows |= {"label": rows["label"] & 1, "replayed": rows["label"] >> 1}
        self._windows[number, window] = rows
        if len(self._windows) > _WINDOWS:
            self._windows.popitem(last=False)
        return rows

    def _groups_of_pass(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(row groups in the order of the pass, the position where each ends)."""
        if self._pass is None or self._pass[0] != number:
            order = hashing.permutation(hashing.key(self.seed, *self.splits, "groups", number), len(self._groups))
            self._pass = (number, order, np.cumsum(self._sizes[order]))
        return self._pass[1], self._pass[2]

    def _read_groups(self, groups: np.ndarray) -> list[dict[str, np.ndarray]]:
        # Groups of one file are read in one call, then put back in order.
        tables: dict[int, dict[str, np.ndarray]] = {}
        by_file: OrderedDict[str, list[int]] = OrderedDict()
        for group in np.sort(groups).tolist():
            if group in self._decoded:
                tables[group] = self._decoded[group]
            else:
                by_file.setdefault(self._groups[group][0], []).append(group)
        for name, members in by_file.items():
            table = self._file(name).read_row_groups([self._groups[g][1] for g in members], columns=self.columns)
            columns = {column: table[column].to_numpy() for column in self.columns}
            edges = np.concatenate([[0], np.cumsum(self._sizes[members])])
            for group, (low, high) in zip(members, pairwise(edges)):
                tables[group] = self._kept({column: values[low:high] for column, values in columns.items()}, group)
        return [tables[int(group)] for group in groups]

    def _kept(self, rows: dict[str, np.ndarray], group: int) -> dict[str, np.ndarray]:
        """The rows of a group, kept for later passes if there is room."""
        size = sum(column.nbytes for column in rows.values())
        if self._decoded_bytes + size <= _DECODED_BYTES:
            self._decoded_bytes += size
            # Copies: a slice would keep all that was read with it.
            self._decoded[group] = {name: column.copy() for name, column in rows.items()}
        return rows

    def _file(self, name: str) -> pq.ParquetFile:
        if name in self._files:
            self._files.move_to_end(name)
            return self._files[name]
        if len(self._files) >= _OPEN_FILES:
            self._files.popitem(last=False)[1].close()
        self._files[name] = self.dataset.parquet(name)
        return self._files[name]
