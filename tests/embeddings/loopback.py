"""Models as one rank of many sees them, without the others: for what can be proved on one CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from invdist.config.registry import BACKBONES
from invdist.data.stream.batches import Batch
from invdist.embeddings.comm import Comm, Pending, Traffic
from invdist.embeddings.row_optimizers import Adam
from invdist.embeddings.store import EmbeddingStore
from invdist.embeddings.tables import Layout, Shard, ShardedTables, Table
from invdist.models.flat import FlatAdamW
from invdist.models.recommender import Recommender


class LoopbackComm(Comm):
    """The first of `size` ranks; what it sends comes back, as if all ranks did the same."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.group, self.rank, self.size, self.device, self.traffic = None, 0, size, device, Traffic()
        self.host_reads = 0

    def all_to_all(self, send: Tensor, send_rows: Sequence[int], recv_rows: Sequence[int]) -> Pending:
        self._check(send)
        assert len(send_rows) == len(recv_rows) == self.size
        assert sum(send_rows) == len(send)
        assert sum(recv_rows) == len(send)
        return Pending(send)

    def all_gather(self, send: Tensor, recv_rows: Sequence[int], counts: Tensor) -> Pending:
        self._check(send)
        self._check(counts)
        assert list(recv_rows) == [len(send)] * self.size
        return Pending(send.repeat(self.size, 1))

    def all_reduce(self, tensor: Tensor) -> Pending:
        self._check(tensor)
        return Pending(tensor)

    def to_host(self, tensor: Tensor) -> np.ndarray:
        self.host_reads += 1
        # A meta tensor has no values: each rank is asked for one row.
        return np.ones(tensor.shape, np.int64) if tensor.device.type != "cpu" else super().to_host(tensor)

    def _check(self, tensor: Tensor) -> None:
        assert tensor.device == self.device, f"a tensor on {tensor.device} reaches the ranks of {self.device}"


def row_wise_layout(ranks: int, users: int, items: int, columns: int, replicated_items: bool = False) -> Layout:
    """Both tables cut by rows into equal blocks, or the items on every rank."""
    tables = (Table("user", users, columns), Table("item", items, columns))
    kinds = {"user": "row_wise", "item": "data_parallel" if replicated_items else "row_wise"}
    bases, shards = [0] * ranks, []
    for table in tables:
        block = -(-table.rows // ranks)
        if kinds[table.name] == "data_parallel":
            shards += [Shard(table.name, rank, 0, table.rows, 0, columns, bases[rank]) for rank in range(ranks)]
            continue
        for rank in range(ranks):
            row = min(rank * block, table.rows)
            rows = min(block, table.rows - row)
            shards.append(Shard(table.name, rank, row, rows, 0, columns, bases[rank]))
            bases[rank] += rows
    return Layout(tables, tuple(shards), kinds, columns)


def loopback_model(
    ranks: int,
    device: torch.device,
    *,
    model: str = "gmf",
    users: int = 4096,
    items: int = 4096,
    dim: int = 32,
    replicated_items: bool = False,
) -> Recommender:
    """The first rank's share of a row-wise model; on `meta`, a model without values."""
    with torch.device(device):
        backbone = BACKBONES.get(model)(dim=dim)
    layout = row_wise_layout(ranks, users, items, backbone.columns, replicated_items)
    rows = sum(shard.rows for shard in layout.on(0))
    tables = ShardedTables(layout, torch.zeros((rows, layout.width), device=device), "")
    options: dict[str, Any] = {"gamma": 1e-3, "weight_decay": 0.0, "eps": 1e-8}
    store = EmbeddingStore(
        tables, LoopbackComm(ranks, device), lambda local, _: Adam(local, beta1=0.9, beta2=0.999, **options)
    )
    dense = FlatAdamW(list(backbone.parameters()), lr=1e-3)
    return Recommender(store, backbone, dense)


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
