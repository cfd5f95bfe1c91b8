"""Embedding rows that live on other ranks: pull them, send gradients back, try an update, commit it.

No table is ever copied. An update touches the rows of its batch only and is O(batch) in time and memory
whatever the table size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from invdist.embeddings.comm import Comm
from invdist.embeddings.exchange import Exchange, Pairs, Route, RowLocator, UniqueRows
from invdist.embeddings.row_optimizers import RowOptimizer, store_rows
from invdist.embeddings.tables import Layout, ShardedTables

_INIT_BLOCK = 1 << 16


@dataclass(slots=True)
class RowUpdate:
    """Something to do to the touched rows this rank owns: a gradient or a step, `[rows, width]`."""

    unique: UniqueRows
    values: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> RowUpdate:
        """The same rows with other values."""
        return RowUpdate(self.unique, function(self.values))


class EmbeddingStore:
    """The sharded tables of users and items, seen from one rank."""

    def __init__(
        self, tables: ShardedTables, comm: Comm, make_optimizer: Callable[[Tensor, EmbeddingStore], RowOptimizer]
    ) -> None:
        self.layout: Layout = tables.layout
        self.local_rows = tables.local_rows
        self.plan_stats = tables.stats
        self.comm = comm
        self._locate = RowLocator(self.layout, comm.size, self.local_rows.device)
        self._owners = self._owner_groups()
        self.optimizer = make_optimizer(self.local_rows, self)

    @property
    def columns(self) -> int:
        """Columns of a whole row."""
        return self.layout.tables[0].columns

    @torch.no_grad()
    def init(self, seed: int, std: float) -> None:
        """Draws N(0, std) rows: a function of (seed, table, row) alone, whatever the sharding."""
        for number, table in enumerate(self.layout.tables):
            for shard in self.layout.on(self.comm.rank):
                if shard.table != table.name:
                    continue
                first, end = shard.row, shard.row + shard.rows
                for block in range(first // _INIT_BLOCK, -(-end // _INIT_BLOCK)):
                    low, high = block * _INIT_BLOCK, min((block + 1) * _INIT_BLOCK, table.rows)
                    source = torch.Generator().manual_seed(_mix(seed, number, block))
                    drawn = torch.empty(high - low, table.columns).normal_(0.0, std, generator=source)
                    a, b = max(first, low), min(end, high)
                    cut = drawn[a - low : b - low, shard.column : shard.column + shard.columns]
                    self.local_rows[shard.base + a - first : shard.base + b - first].copy_(cut)

    def exchange(self, groups: Sequence[Pairs]) -> Exchange:
        """Starts to find the owners of all rows that `groups` of pairs name."""
        return Exchange(self.layout, self.comm, groups, self._locate)

    @torch.no_grad()
    def pull(self, exchange: Exchange) -> list[Tensor]:
        """The rows of every group: `[2n, columns]` each, users first."""
        exchange.finish()
        if self.comm.size == 1 or self.layout.replicated:
            return [self._rows(self.local_rows.index_select(0, route.cells)) for route in exchange.routes]
        answer = self.local_rows.index_select(0, exchange.cells)
        arrived = self.comm.all_to_all(answer, exchange.received_rows(), exchange.sent_rows()).wait()
        return [self._rows(_take(arrived, route.joint_index)) for route in exchange.routes]

    @torch.no_grad()
    def push(self, route: Route, gradient: Tensor) -> Callable[[], RowUpdate]:
        """Sends the gradient of one group's rows (`[2n, columns]`) to their owners.

        Gives a function that waits for those of this rank's rows and sums them by distinct row.
        """
        cells = _take(gradient.reshape(-1, self.layout.width), route.send_order)
        pending = self.comm.all_to_all(cells, route.sent, route.received)
        return lambda: RowUpdate(route.unique, route.unique.sum(pending.wait()))

    @torch.no_grad()
    def lookup_delta(self, route: Route, update: RowUpdate) -> Tensor:
        """What `update` would add to the rows of a group: `[2n, columns]`, zero where it touches nothing."""
        padded = torch.cat([update.values, update.values.new_zeros((1, self.layout.width))])
        deltas = padded.index_select(0, update.unique.find(route.cells))
        if self.comm.size == 1 or self.layout.replicated:
            return self._rows(deltas)
        arrived = self.comm.all_to_all(deltas, route.received, route.sent).wait()
        return self._rows(_take(arrived, route.place))

    @torch.no_grad()
    def add(self, update: RowUpdate, scale: float) -> None:
        """Adds `scale * update` to the rows it touches."""
        if scale and len(update.values):
            rows = update.unique.rows
            store_rows(self.local_rows, rows, self.local_rows.index_select(0, rows).add_(update.values, alpha=scale))

    @torch.no_grad()
    def step(self, gradient: RowUpdate) -> None:
        """One optimizer step on the touched rows."""
        self.optimizer.update(self.local_rows, gradient.unique.rows, gradient.values)

    def square_sum(self, rows: Tensor, squares: Tensor) -> Tensor:
        """Completes per-row sums over the column shards of each table, here and on the other owners."""
        if not self._owners:
            return squares
        whole = squares.clone()
        for table in self.layout.tables:
            if table.name not in self._owners:
                continue
            shards = [s for s in self.layout.on(self.comm.rank) if s.table == table.name]
            if not shards:
                continue
            edges = torch.tensor([[s.base, s.base + s.rows] for s in shards], device=rows.device)
            cuts = torch.searchsorted(rows, edges.to(rows.dtype)).tolist()
            total = torch.stack([squares[a:b] for a, b in cuts]).sum(0)
            group = self._owners[table.name]
            if group is not None:
                dist.all_reduce(total, group=group)
            for a, b in cuts:
                whole[a:b] = total
        return whole

    def _owner_groups(self) -> dict[str, dist.ProcessGroup | None]:
        """For each table cut into columns, the process group of its owners (None: one owner has them all)."""
        groups: dict[str, dist.ProcessGroup | None] = {}
        for table in self.layout.tables:
            if self.layout.sharding[table.name] == "column_wise":
                owners = sorted({shard.rank for shard in self.layout.of(table.name)})
                # Not a group on ranks outside it, which never use it.
                groups[table.name] = cast(Any, dist.new_group(owners)) if len(owners) > 1 else None
        return groups

    def _rows(self, cells: Tensor) -> Tensor:
        return cells.view(-1, self.columns)


def _take(cells: Tensor, order: Tensor | None) -> Tensor:
    """Cells in an order; None: as they stand."""
    return cells if order is None else cells.index_select(0, order)


def _mix(*numbers: int) -> int:
    """One well-mixed seed of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))
