"""One rank of many, without the others: for what can be measured or proved in one process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from invdist.embeddings.comm import Comm, Pending, Traffic
from invdist.embeddings.tables import Layout, Shard, Table


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
