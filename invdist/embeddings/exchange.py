"""Which rank is asked for which row: the route of one step's ids, found once and used for every exchange.

A row is asked for by the rank whose batch names it and answered by its owner. The route depends on ids
only, so the next batch's route is found while this batch is being computed: `begin` counts, `advance`
sends the ids, `finish` receives them, and each may wait in the background.

A table row is exchanged in *cells*: the whole row, or one piece per column shard. Shapes: `n` pairs of a
group ask for `2n` rows (users first), that is `cells = 2n * pieces` cells of `width` columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from invdist.embeddings.comm import Comm, Pending
from invdist.embeddings.tables import Layout


class Pairs(NamedTuple):
    """User-item pairs: two index tensors of the same length. To look rows up, the lengths may differ."""

    user: Tensor
    item: Tensor


@dataclass(slots=True)
class Route:
    """The way of one group's cells between the rank that asks and the ranks that own."""

    pairs: int
    """Pairs of this group on the asking rank."""
    send_order: Tensor | None
    """Cell index of each sent cell, in order of owner. None: cells are sent as they stand."""
    place: Tensor | None
    """Where each cell stands in an answer to this group alone: the inverse of `send_order`."""
    joint_index: Tensor | None
    """Where each cell stands in an answer to all groups at once."""
    sent: list[int]
    """Cells sent to each rank."""
    received: list[int]
    """Cells asked for by each rank."""
    cells: Tensor
    """Arena rows asked for, in order of asking rank (on a replicated layout: this rank's own)."""
    updated: Tensor
    """Arena rows that gradients arrive for: `cells`, and on a replicated layout those of all ranks."""
    features: Any = None
    """What is known ahead of the pairs of this group and never trained; passed on to `Recommender.logits`."""
    _unique: UniqueRows | None = None

    @property
    def unique(self) -> UniqueRows:
        """The distinct rows of `updated`, sorted when first wanted: who only looks at rows never pays for it."""
        if self._unique is None:
            self._unique = UniqueRows.of(self.updated)
        return self._unique


@dataclass(slots=True)
class UniqueRows:
    """The distinct local_rows rows among those asked for, and how occurrences fall to them."""

    rows: Tensor
    """Distinct local_rows rows, ascending."""
    order: Tensor
    """Occurrences sorted by local_rows row."""
    starts: Tensor
    """Where each distinct row's occurrences begin in `order`."""

    @classmethod
    def of(cls, cells: Tensor) -> UniqueRows:
        """Sorts the asked-for cells once; sums over occurrences are then segments."""
        rows, order = torch.sort(cells, stable=True)
        if len(rows) == 0:
            return cls(rows, order, order)
        new = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        torch.ne(rows[1:], rows[:-1], out=new[1:])
        starts = new.nonzero().view(-1)
        return cls(rows.index_select(0, starts), order, starts)

    def sum(self, occurrences: Tensor) -> Tensor:
        """Sums `[cells, width]` over the occurrences of each distinct row: `[rows, width]`."""
        if len(self.rows) == 0:
            return occurrences.new_zeros((0, occurrences.shape[1]))
        return torch.nn.functional.embedding_bag(self.order, occurrences, self.starts, mode="sum")

    def find(self, cells: Tensor) -> Tensor:
        """Index of each of `cells` among `rows`; `len(rows)` where it is not there."""
        if len(self.rows) == 0:
            return torch.zeros_like(cells, dtype=torch.int64)
        at = torch.searchsorted(self.rows, cells).clamp_(max=len(self.rows) - 1)
        return torch.where(self.rows.index_select(0, at) == cells, at, len(self.rows))


class Exchange:
    """The routes of all groups of one step. Made by `Exchange.begin`; `finish` before use."""

    def __init__(self, layout: Layout, comm: Comm, groups: Sequence[Pairs], where: RowLocator) -> None:
        self._comm, self._replicated = comm, layout.replicated
        self._send_orders: list[Tensor | None] = []
        self._asked: list[Tensor] = []
        self._own: list[Tensor] = []
        self._sent: list[list[int]] = []
        self._pairs = [len(group.user) for group in groups]
        self.routes: list[Route] = []
        for group in groups:
            owner, cells = where(group)
            if comm.size == 1:
                send_order, sent = None, [len(cells)]
            elif self._replicated:
                send_order, sent = (
                    torch.arange(len(cells), device=cells.device).repeat(comm.size),
                    [len(cells)] * comm.size,
                )
            else:
                send_order = torch.argsort(owner, stable=True)
                sent = torch.bincount(owner, minlength=comm.size).tolist()
            self._send_orders.append(send_order)
            self._own.append(cells)
            self._asked.append(cells if send_order is None else cells.index_select(0, send_order))
            self._sent.append(sent)
        self._counts: Pending | None = None
        self._ids: Pending | None = None
        if comm.size > 1:
            by_rank = [self._sent[g][r] for r in range(comm.size) for g in range(len(groups))]
            counts = torch.tensor(by_rank, dtype=torch.int64, device=groups[0].user.device)
            self._counts = comm.all_to_all(counts, [len(groups)] * comm.size, [len(groups)] * comm.size)

    def advance(self) -> Exchange:
        """Learns how much each rank asks for, and sends the ids on their way. Later calls do nothing."""
        if self._counts is None or self._ids is not None:
            return self
        groups = len(self._asked)
        flat = self._counts.wait().tolist()
        self._received = [flat[g::groups] for g in range(groups)]
        parts = [torch.split(asked, sent) for asked, sent in zip(self._asked, self._sent, strict=True)]
        send = torch.cat([parts[g][r] for r in range(self._comm.size) for g in range(groups)])
        self._ids = self._comm.all_to_all(send, self.sent_rows(), self.received_rows())
        return self

    def finish(self) -> Exchange:
        """Receives the ids asked of this rank. Later calls do nothing."""
        if self.routes:
            return self
        if self._comm.size == 1:
            for pairs, cells in zip(self._pairs, self._asked, strict=True):
                count = [len(cells)]
                self.routes.append(Route(pairs, None, None, None, count, count, cells, cells))
            self._received, self.cells = (
                self._sent,
                torch.cat(self._asked) if len(self._asked) > 1 else self._asked[0],
            )
            return self
        self.advance()
        assert self._ids is not None
        groups, ranks = range(len(self._asked)), range(self._comm.size)
        self.cells = self._ids.wait()
        parts = torch.split(self.cells, [self._received[g][r] for r in ranks for g in groups])
        for g in groups:
            send_order, sent, asked = self._send_orders[g], self._sent[g], torch.cat(parts[g :: len(groups)])
            assert send_order is not None
            place = joint_index = None
            if not self._replicated:
                place = torch.empty_like(send_order)
                place[send_order] = torch.arange(len(send_order), device=send_order.device)
                joint_index = (
                    place if len(groups) == 1 else place + self._shift(g).index_select(0, self._rank_of(place, g))
                )
            own = self._own[g] if self._replicated else asked
            self.routes.append(
                Route(self._pairs[g], send_order, place, joint_index, sent, self._received[g], own, asked)
            )
        return self

    def _rank_of(self, place: Tensor, g: int) -> Tensor:
        """The owner that answers each cell of group g, from its place in that group's answer."""
        ends = torch.tensor(self._sent[g], device=place.device).cumsum(0)
        return torch.searchsorted(ends, place, right=True)

    def _shift(self, g: int) -> Tensor:
        """By how much group g's answers of each rank stand later in a joint_index answer than in its own."""
        groups, shifts, joint_index, own = range(len(self._sent)), [], 0, 0
        for r in range(self._comm.size):
            shifts.append(joint_index + sum(self._sent[h][r] for h in groups if h < g) - own)
            joint_index += sum(self._sent[h][r] for h in groups)
            own += self._sent[g][r]
        return torch.tensor(shifts, device=self._asked[g].device)

    def sent_rows(self) -> list[int]:
        """Cells this rank asks of each rank, all groups together."""
        return [sum(counts) for counts in zip(*self._sent, strict=True)]

    def received_rows(self) -> list[int]:
        """Cells each rank asks of this rank, all groups together."""
        return [sum(counts) for counts in zip(*self._received, strict=True)]


class RowLocator:
    """Finds the owner and the local_rows row of each cell that pairs ask for."""

    def __init__(self, layout: Layout, size: int, device: torch.device) -> None:
        self.pieces = layout.tables[0].columns // layout.width
        self._tables = []
        for table in layout.tables:
            shards = layout.of(table.name)
            if layout.sharding[table.name] == "row_wise":
                block = shards[0].rows
                bases = torch.zeros(size, dtype=torch.int64)
                for shard in shards:
                    bases[shard.rank] = shard.base - shard.row
                self._tables.append((block, bases.to(device), None))
            elif layout.replicated:
                self._tables.append((0, torch.tensor([shards[0].base], device=device), None))
            else:
                bases = torch.tensor([shard.base for shard in shards], device=device)
                ranks = torch.tensor([shard.rank for shard in shards], device=device)
                self._tables.append((0, bases, ranks))
        self._single = size == 1
        self._rows = [table.rows for table in layout.tables]

    def __call__(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Owner and local_rows row of every cell: two tensors `[2n * pieces]`."""
        owners, cells = [], []
        for ids, (block, bases, ranks) in zip(pairs, self._tables, strict=True):
            if block and not self._single:
                owner = torch.div(ids, block, rounding_mode="floor")
                owners.append(owner)
                cells.append(ids + bases.index_select(0, owner))
            else:
                cells.append((ids.unsqueeze(1) + bases).view(-1))
                if ranks is not None and not self._single:
                    owners.append(ranks.repeat(len(ids)))
        return torch.cat(owners) if owners else cells[0], torch.cat(cells)
