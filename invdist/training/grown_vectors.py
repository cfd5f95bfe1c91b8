"""Exposure vectors of a data set that grew: the older ones are where the iteration starts, and what it is aligned to.

Singular vectors are unique up to their signs, and those of near singular values up to a rotation. So vectors learned
again may be turned against the older ones, and what a head has learned of each column would be about something else.
They are turned back: by the rotation that brings the vectors of known ids nearest to what they were (orthogonal
Procrustes). A rotation keeps lengths and angles, so nothing that the vectors say is lost. Users and items have
weights of their own in the head, and so each a rotation of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from invdist.config.schema import ExposuresConfig
from invdist.data.dataset import Dataset
from invdist.embeddings.placement import ids_at
from invdist.embeddings.store import EmbeddingStore
from invdist.training.checkpoint import CheckpointInfo
from invdist.training.growth import Parent, copy_rows

_BLOCK_ROWS = 1 << 16


class OlderVectors:
    """The vectors `found` of the parent's data set, by the ids of a newer one."""

    def __init__(self, found: CheckpointInfo, parent: Parent, dataset: Dataset, exposures: ExposuresConfig) -> None:
        self._found, self._ids, self._dim = found, parent.ids(dataset), exposures.dim
        self._labels = exposures.learned + 1  # after the vector and the number of exposures
        self.unchanged = parent.dataset.fingerprint == dataset.fingerprint
        """Nothing to learn: the vectors are those of this data set."""

    def fill(self, table: str, rows: Tensor, first: int, multiplier: int = 1) -> None:
        """Fills `rows`, those of a table from `first` on, with leading columns of their vectors; zero for new ids.

        Rows are counted by place, if tables have a `multiplier` (`Layout.multipliers`).
        """
        name = f"rows/{table}/weight"
        rows.zero_()
        source = self._ids[table]
        source = source[ids_at(first, first + len(rows), len(source), multiplier).numpy()]
        copy_rows(
            lambda block, at: self._found.read_into(name, block, at),
            self._found.manifest.tensors[name].rows,
            source,
            rows,
        )

    def align(self, vectors: EmbeddingStore) -> None:
        """Turns the columns that the model reads to where the older ones were; every rank calls it.

        Counts of labels become at least the older ones: a model keeps what it has learned from labels that are no
        longer there, and is held near zero the less for it.
        """
        for table in self._ids:
            multiplier = vectors.layout.multipliers.get(table, 1)
            shards = [shard for shard in vectors.layout.on(vectors.comm.rank) if shard.table == table]
            parts = [
                (vectors.local_rows[shard.base + at : shard.base + min(at + _BLOCK_ROWS, shard.rows)], shard.row + at)
                for shard in shards
                for at in range(0, shard.rows, _BLOCK_ROWS)
            ]
            product = torch.zeros((self._dim, self._dim), dtype=torch.float64)
            for rows, first in parts:
                older = torch.empty(rows.shape)
                self.fill(table, older, first, multiplier)
                labels = rows[:, self._labels]
                labels.copy_(torch.maximum(labels, older[:, self._labels].to(labels)))
                new, old = (normalize(each[:, : self._dim].cpu(), dim=1).double() for each in (rows, older))
                product += new.T @ old
            left, _, right = torch.linalg.svd(vectors.comm.all_reduce(product.to(vectors.comm.device)).wait())
            rotation = (left @ right).float()
            for rows, _ in parts:
                rows[:, : self._dim] = rows[:, : self._dim] @ rotation
