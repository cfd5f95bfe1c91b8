"""What one worker holds: a range of the rows of both tables, and of their raw ids."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from invdist.serving.raw_ids import pc
from invdist.serving.run import TrainedRun
from invdist.serving.sharded.ids import IdShare

Side = Literal["user", "item"]
SIDES: tuple[Side, Side] = ("user", "item")
_ENTITY: dict[Side, Literal["users", "items"]] = {"user": "users", "item": "items"}


@dataclass(frozen=True, slots=True)
class Cut:
    """A table of `rows` rows divided among `workers`: each has the same range of `size` rows, the last ones less.

    Ranges begin at multiples of `unit`.
    """

    rows: int
    workers: int
    unit: int = 1

    @property
    def size(self) -> int:
        """Rows of a whole range."""
        return max(1, -(-self.rows // (self.unit * self.workers))) * self.unit

    def range_of(self, worker: int) -> tuple[int, int]:
        """(first row, end) of a worker."""
        return min(worker * self.size, self.rows), min((worker + 1) * self.size, self.rows)

    def owners(self, rows: np.ndarray) -> np.ndarray:
        """The worker that has each row (int64)."""
        return rows // self.size


class Slice:
    """The rows of a worker; read from the checkpoint when they are first asked for, by whichever thread asks."""

    def __init__(self, run: TrainedRun, cuts: Sequence[Cut], worker: int) -> None:
        self._run, self._cuts, self._worker = run, dict(zip(SIDES, cuts, strict=True)), worker
        self._lock = threading.RLock()
        self._rows: dict[Side, Tensor] = {}
        self._raw: dict[Side, pa.Array] = {}
        self._shares: dict[Side, IdShare] = {}

    def verify(self) -> None:
        """Compares this worker's share of the checkpoint's files with their checksums."""
        self._run.checkpoint.verify(self._worker, self._cuts["user"].workers)

    def table(self, side: Side) -> Tensor:
        """All rows of this worker."""
        with self._lock:
            if side not in self._rows:
                self._rows[side] = self._run.tables.rows(side, *self._cuts[side].range_of(self._worker))
            return self._rows[side]

    def rows(self, side: Side, indices: np.ndarray) -> np.ndarray:
        """Rows of indices, all of them in this worker's range."""
        local = torch.from_numpy(indices - self._cuts[side].range_of(self._worker)[0])
        return torch.index_select(self.table(side), 0, local).numpy()

    def rows_of_both(self, user: np.ndarray, item: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows of users and of items."""
        return self.rows("user", user), self.rows("item", item)

    def raw(self, side: Side, indices: pa.Array) -> pa.Array:
        """Raw ids of indices, all of them in this worker's range."""
        first, end = self._cuts[side].range_of(self._worker)
        with self._lock:
            if side not in self._raw:
                pieces = list(self._run.dataset.scan_raw_ids(_ENTITY[side], first, end))
                self._raw[side] = pa.concat_arrays(pieces)
        return self._raw[side].take(pc.subtract(indices, first))

    def indices(self, side: Side, ids: pa.Array) -> np.ndarray:
        """Indices of raw ids, all of them in this worker's share."""
        with self._lock:
            if side not in self._shares:
                batches = self._run.dataset.scan_raw_ids(_ENTITY[side])
                self._shares[side] = IdShare(batches, self._worker, self._cuts[side].workers)
        return self._shares[side].indices(ids)
