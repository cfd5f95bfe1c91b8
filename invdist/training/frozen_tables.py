"""Tables that are not trained, with the rows of a run's model on the same ranks: one route serves both."""

from __future__ import annotations

import torch

from invdist.config import Config
from invdist.data.dataset import Dataset
from invdist.embeddings.comm import Comm
from invdist.embeddings.placement import Table
from invdist.embeddings.row_optimizers import NoOptimizer
from invdist.embeddings.store import EmbeddingStore
from invdist.embeddings.tables import shard_tables
from invdist.models.build import indexed_device
from invdist.training.sizes import batch_size


def frozen_tables(
    config: Config, dataset: Dataset, columns: int, *, device: torch.device, comm: Comm
) -> EmbeddingStore:
    """One row of `columns` for each user and item of a data set, cut row-wise over the ranks; every rank calls it."""
    sizes = (("user", dataset.users), ("item", dataset.items))
    device = indexed_device(device)
    # TorchRec draws first values: a run that is resumed must not draw other numbers after it than the whole one.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        tables = shard_tables(
            tuple(Table(name, rows, columns) for name, rows in sizes),
            "row_wise",
            device=device,
            batch_size=batch_size(config),
            hbm_gb=config.rows.hbm_gb,
            ddr_gb=config.rows.ddr_gb,
            memory=config.rows.memory,
            hashed=config.rows.placement == "hashed",
            group=comm.group,
        )
    return EmbeddingStore(tables, comm, lambda local_rows, store: NoOptimizer())
