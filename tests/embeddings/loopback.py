"""Models as one rank of many sees them, without the others: for what can be proved on one CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from invdist.bench._loopback import LoopbackComm, row_wise_layout
from invdist.config.registry import BACKBONES
from invdist.config.schema import ExposuresConfig
from invdist.data.stream.batches import Batch
from invdist.embeddings.row_optimizers import Adam, NoOptimizer, RowOptimizer
from invdist.embeddings.store import EmbeddingStore
from invdist.embeddings.tables import ShardedTables
from invdist.models.build import with_head
from invdist.models.flat import FlatAdamW
from invdist.models.recommender import Recommender


def loopback_model(
    ranks: int,
    device: torch.device,
    *,
    model: str = "gmf",
    users: int = 4096,
    items: int = 4096,
    dim: int = 32,
    replicated_items: bool = False,
    vectors: bool = False,
) -> Recommender:
    """The first rank's share of a row-wise model; on `meta`, a model without values."""
    with torch.device(device):
        exposures = ExposuresConfig(vectors=vectors, dim=64, learned=64)
        backbone = with_head(BACKBONES.get(model)(dim=dim), exposures)
    comm = LoopbackComm(ranks, device)

    def store(columns: int, optimizer: Callable[[Tensor], RowOptimizer]) -> EmbeddingStore:
        layout = row_wise_layout(ranks, users, items, columns, replicated_items)
        rows = sum(shard.rows for shard in layout.on(0))
        tables = ShardedTables(layout, torch.zeros((rows, layout.width), device=device), "")
        return EmbeddingStore(tables, comm, lambda local, _: optimizer(local))

    rows = store(
        backbone.columns, lambda local: Adam(local, gamma=1e-3, weight_decay=0.0, beta1=0.9, beta2=0.999, eps=1e-8)
    )
    dense = FlatAdamW(list(backbone.parameters()), lr=1e-3)
    frozen = store(backbone.frozen_columns, lambda _: NoOptimizer()) if vectors else None
    return Recommender(rows, backbone, dense, vectors=frozen)


def batch(rows: int, rate: int, device: torch.device, *, users: int = 4096, items: int = 4096, seed: int = 0) -> Batch:
    """Random labeled and unlabeled pairs."""
    source = torch.Generator().manual_seed(seed)

    def draw(high: int, count: int) -> Tensor:
        return torch.randint(high, (count,), generator=source).to(device)

    return Batch(
        draw(users, rows),
        draw(items, rows),
        draw(2, rows).float(),
        draw(users, rows * rate),
        draw(items, rows * rate),
        rows,
        0,
    )
