"""Who was shown what: the pairs of all training exposures, without their labels, divided over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from invdist.data.dataset import Dataset
from invdist.data.schema import TRAINING_LABELED, UNCLEAR_LABEL

EXPOSED = ("train", "training_test", "unclear")
"""Splits whose pairs are training exposures. A pair is in one split only."""
BATCH_ROWS = 16_384
"""Exposures of a batch on each rank, in whole row groups. More take a little less time and much more memory."""


class ExposurePairs:
    """The exposures of a data set, in batches of whole row groups.

    Rank r of W reads row groups r, r + W, ... of all shards. `steps` is the same on every rank, so a rank may get empty
    batches at the end. The order has no meaning: use it for sums over all exposures.
    """

    def __init__(
        self,
        dataset: Dataset,
        rank: int,
        world_size: int,
        splits: Sequence[str] = EXPOSED,
        batch_rows: int = BATCH_ROWS,
    ) -> None:
        self.dataset = dataset
        self.rows = sum(dataset.rows[split] for split in splits)
        """Exposures over all ranks."""
        groups = dataset.row_groups(splits)
        self._mine = groups[rank::world_size]
        self._per_batch = max(1, batch_rows // dataset.manifest["row_group_rows"])
        self.steps = -(-len(groups[::world_size]) // self._per_batch)

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Users and items (int64) of this rank's exposures, `steps` times."""
        for groups in self._groups():
            user, item = self.dataset.read_groups(groups, ["user", "item"])
            yield user.astype(np.int64), item.astype(np.int64)

    def _groups(self) -> Iterator[list[tuple[str, int]]]:
        """The row groups of each batch."""
        for step in range(self.steps):
            yield self._mine[step * self._per_batch : (step + 1) * self._per_batch]


class LabeledPairs(ExposurePairs):
    """The pairs whose labels a model learns from or, as one that grew, has learned from on an earlier day."""

    def __init__(self, dataset: Dataset, rank: int, world_size: int) -> None:
        self.set_aside = bool(dataset.manifest.get("set_aside"))
        """Whether labels of earlier days may be among them."""
        super().__init__(dataset, rank, world_size, EXPOSED if self.set_aside else TRAINING_LABELED)

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """As those of exposures."""
        if not self.set_aside:
            yield from super().batches()
            return
        for groups in self._groups():
            user, item, label = self.dataset.read_groups(groups, ["user", "item", "label"])
            labeled = label != UNCLEAR_LABEL
            yield user[labeled].astype(np.int64), item[labeled].astype(np.int64)
