"""Who was shown what: the pairs of all training exposures, without their labels, divided over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from invdist.data.dataset import Dataset

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
        group_rows = dataset.manifest["row_group_rows"]
        groups = [
            (shard["file"], number)
            for split in splits
            for shard in dataset.shards(split)
            for number in range(-(-shard["rows"] // group_rows))
        ]
        self._mine = groups[rank::world_size]
        self._per_batch = max(1, batch_rows // group_rows)
        self.steps = -(-len(groups[::world_size]) // self._per_batch)

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Users and items (int64) of this rank's exposures, `steps` times."""
        for step in range(self.steps):
            groups = self._mine[step * self._per_batch : (step + 1) * self._per_batch]
            by_file: dict[str, list[int]] = {}
            for file, number in groups:
                by_file.setdefault(file, []).append(number)
            user, item = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
            for file, numbers in by_file.items():
                with self.dataset.parquet(file) as parquet:
                    table = parquet.read_row_groups(numbers, columns=["user", "item"])
                user.append(table["user"].to_numpy())
                item.append(table["item"].to_numpy())
            yield np.concatenate(user).astype(np.int64), np.concatenate(item).astype(np.int64)
