"""Sharded embedding tables: pull rows from their owners, send gradients back, try an update, commit it.

No table is copied. An update touches the rows of its batch only: it is O(batch) in time and memory, whatever the
size of the tables.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from invdist.embeddings.comm import Comm, Pending, T, Widened, use_all
from invdist.embeddings.exchange import Copies, Exchange, Route
from invdist.embeddings.in_place import SharedRows, deltas_of_touched, show_gradient, with_gradient_memory
from invdist.embeddings.locate import Pairs, RowLocator
from invdist.embeddings.row_moves import (
    Deltas,
    SignStep,
    UniqueRows,
    add_rows,
    gather_keys,
    gather_parts,
    gather_rows,
    square_sum,
)
from invdist.embeddings.row_optimizers import RowOptimizer
from invdist.embeddings.tables import Layout, ShardedTables
from invdist.runtime.process import use_huge_pages

_INIT_BLOCK = 1 << 16


@dataclass(slots=True)
class RowUpdate:
    """A gradient or a step of the touched rows that this rank owns: `[rows, width]`."""

    unique: UniqueRows
    values: Tensor
    square: float | Tensor = math.nan
    """This rank's share of the squared norm of the gradient that it is or was made of; NaN: not computed."""

    def map(self, function: Callable[[Tensor], Tensor]) -> RowUpdate:
        """The same rows with other values."""
        return RowUpdate(self.unique, function(self.values), self.square)


class EmbeddingStore:
    """The sharded tables of users and items, seen from one rank."""

    def __init__(
        self,
        tables: ShardedTables,
        comm: Comm,
        make_optimizer: Callable[[Tensor, EmbeddingStore], RowOptimizer],
        payload: str = "fp32",
    ) -> None:
        self.layout: Layout = tables.layout
        self._replicated, self._whole_rows = self.layout.replicated, self.layout.whole_rows
        self._copied = [shard for shard in self.layout.on(comm.rank) if shard.table in self._replicated]
        shared = comm.share(tables.local_rows)
        self._shared = None if shared is None else SharedRows(shared, comm)
        own = use_huge_pages(tables.local_rows) if shared is None else shared[comm.rank]
        self.local_rows = own.detach()  # nothing that is computed of them has a gradient, so no method turns it off
        self.plan_stats = tables.stats
        self.comm, self._bf16 = comm, payload == "bf16"
        self.changed: Tensor | None = None
        """Which local rows were changed since `track`, bool; None: not recorded."""
        self._locate = RowLocator(self.layout, comm.size, self.local_rows.device, comm.rank)
        self._owners = self._owner_groups()
        self.optimizer = make_optimizer(self.local_rows, self)

    @property
    def columns(self) -> int:
        """Columns of a whole row."""
        return self.layout.tables[0].columns

    @torch.no_grad()
    def init(self, seed: int, std: float) -> None:
        """Draws N(0, std) rows, which depend on (seed, table, row) only and not on the sharding."""
        for number, table in enumerate(self.layout.tables):
            for shard in self.layout.on(self.comm.rank):
                if shard.table != table.name:
                    continue
                first, end = shard.row, shard.row + shard.rows
                multiplier = self.layout.multipliers.get(table.name, 1)
                blocks = range(first // _INIT_BLOCK, -(-end // _INIT_BLOCK))
                for block in blocks if multiplier == 1 else range(-(-table.rows // _INIT_BLOCK)):
                    low, high = block * _INIT_BLOCK, min((block + 1) * _INIT_BLOCK, table.rows)
                    source = torch.Generator().manual_seed(_mix(seed, number, block))
                    drawn = torch.empty(high - low, table.columns).normal_(0.0, std, generator=source)
                    if multiplier != 1:  # a whole row each: such tables are not cut by columns
                        place = torch.arange(low, high) * multiplier % table.rows
                        mine = (place >= first) & (place < end)
                        target = (place[mine] - first + shard.base).to(self.local_rows.device)
                        self.local_rows[target] = drawn[mine].to(self.local_rows.device)
                        continue
                    a, b = max(first, low), min(end, high)
                    cut = drawn[a - low : b - low, shard.column : shard.column + shard.columns]
                    self.local_rows[shard.base + a - first : shard.base + b - first].copy_(cut)

    def track(self) -> None:
        """Records from now on which local rows change."""
        self.changed = torch.zeros(len(self.local_rows), dtype=torch.bool, device=self.local_rows.device)

    def exchange(self, groups: Sequence[Pairs], *, distinct: bool = False) -> Exchange:
        """Starts to find the owners of all rows that `groups` of pairs name.

        `distinct`: `pull` may be asked for the distinct rows of a group.
        """
        return Exchange(self._locate, self.comm, groups, sums=self._bf16, exact=distinct)

    def pull(self, exchange: Exchange, distinct: Sequence[int] = ()) -> list[Tensor]:
        """The rows of every group: `[2n, columns]` each, users first.

        Of the groups numbered in `distinct` each distinct row only once, if that is at most half as many
        (`Route.distinct`): `[m, columns]`, in the order of `Route.pieces`.
        """
        routes = exchange.finish().routes
        for group in distinct:
            routes[group].distinct = self._repeats(routes[group])
        if routes[0].local:
            return [
                self._whole(gather_rows(self.local_rows, r.unique.rows if r.distinct else _present(r.held)))
                for r in routes
            ]
        if self._shared is not None:
            self._shared.wait_until_written()
            pulled = [self._whole(self._read(route, self._shared.of_ranks)) for route in routes]
            return [with_gradient_memory(rows, route, self.comm) for rows, route in zip(pulled, routes, strict=True)]
        wanted = exchange.joint_requested
        answer = self.comm.send_buffer(len(wanted), self.layout.width, self.local_rows)
        gather_rows(self.local_rows, wanted, out=answer)
        arriving = self._send(answer, exchange.received, exchange.sent)
        return arriving.use(lambda parts: [self._whole(self._pieces(parts, route)) for route in routes])

    def freeze(self) -> None:
        """No row changes from now on, so that reading waits for no other rank; every rank calls it."""
        if self._shared is not None:
            self._shared.freeze()

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[None]:
        """All rows get other values inside, on every rank."""
        if self._shared is not None:
            self.comm.barrier()
            self._shared.changed()
        yield

    def _read(self, route: Route, of_ranks: Sequence[Tensor]) -> Tensor:
        """The pieces of a batch, where this rank can read those of all ranks."""
        keys, held = _present(route.asked).rows if route.distinct else _present(route.keys), route.held
        pieces = self.local_rows.new_empty((len(keys) + (0 if held is None else len(held)), self.layout.width))
        asked, own = self._asked_and_held(pieces, route)
        gather_keys(of_ranks, self._locate.row_bits, keys, out=asked)
        if self._bf16:
            asked.copy_(asked.bfloat16())
        if held is not None:
            gather_rows(self.local_rows, held, out=own)
        return pieces

    def _repeats(self, route: Route) -> bool:
        """Whether rows repeat so often in a group that it is worth to have each once."""
        sorted_here = route.shown is None or route.asked is not None
        return route.copies is None and self._whole_rows and sorted_here and route.pieces.repeats

    def _pieces(self, parts: Sequence[Tensor], route: Route) -> Tensor:
        """The pieces of a batch from the answer of their owners, and those that this rank has."""
        if route.distinct:
            return gather_parts(parts, route.joint_places) if route.joint_places is not None else torch.cat(list(parts))
        index, held = route.joint_index, route.held
        if held is None:
            return gather_parts(parts, index)
        pieces = self.local_rows.new_empty((len(index) + len(held), self.layout.width))
        asked, own = self._asked_and_held(pieces, route)
        gather_parts(parts, index, out=asked)
        gather_rows(self.local_rows, held, out=own)
        return pieces

    def _asked_and_held(self, pieces: Tensor, route: Route) -> tuple[Tensor, Tensor]:
        """The pieces that owners are asked for, and those of a replicated table: one is users, the other items."""
        held = 0 if route.held is None else len(route.held)
        if self.layout.tables[0].name in self._replicated:
            return pieces[held:], pieces[:held]
        return pieces[: len(pieces) - held], pieces[len(pieces) - held :]

    def push(self, route: Route, gradient: Tensor) -> Callable[..., RowUpdate]:
        """Sends the gradient of one group's rows, as they were pulled, summed by distinct row, to their owners.

        Gives a function that waits for the gradients of this rank's rows, sums them by distinct row, and multiplies
        them by its first argument if it gets one. With `squared=True` the norm is taken in the same pass; with `sign`,
        a `SignStep`, the update then has the step of each value.
        """
        pieces, pending, shown = gradient.reshape(-1, self.layout.width), [], route.shown
        if shown is not None:
            arriving = show_gradient(pieces, route, self.comm, bf16=self._bf16)
            arriving = Widened(arriving) if self._bf16 else arriving
            return lambda scale=None, **finish: arriving.use(
                lambda parts: self._summed(shown.unique, parts, shown.gradients, scale, **finish)
            )
        asked, held = self._asked_and_held(pieces, route)
        if route.asked is not None:
            buffer = self.comm.send_buffer(len(route.asked.rows), self.layout.width, pieces)
            summed = buffer.copy_(pieces) if route.distinct else route.asked.sum(asked, out=buffer)
            pending.append(self._send(summed, route.sent, route.received))
        if route.copies is not None:
            pending.append(self._send_to_all(route.copies.rows.sum(held), route.copies))

        def arrive(scale: float | Tensor | None = None, **finish: Any) -> RowUpdate:
            if not pending and route.distinct:
                found = RowUpdate(route.unique, pieces if scale is None else pieces * scale)
                return self._finished(found, **finish)
            everything, unique = pending or [Pending(pieces)], route.unique
            return use_all(everything, lambda parts: self._summed(unique, parts, unique, scale, **finish))

        return arrive

    def _summed(
        self,
        rows: UniqueRows,
        parts: Sequence[Tensor],
        occurrences: UniqueRows,
        scale: float | Tensor | None,
        squared: bool = False,
        sign: SignStep | None = None,
    ) -> RowUpdate:
        """The update of `rows` from what arrived; `occurrences` has which of it belongs to each of them."""
        if squared and not self._copied:
            return RowUpdate(rows, *occurrences.sum_and_step(parts, scale, sign))
        return self._finished(RowUpdate(rows, occurrences.sum_parts(parts, scale)), squared, sign)

    def _finished(self, update: RowUpdate, squared: bool = False, sign: SignStep | None = None) -> RowUpdate:
        if squared:
            update.square = self._square_share(update)
        return update if sign is None else update.map(sign)

    def _send(self, rows: Tensor, send_rows: Sequence[int], recv_rows: Sequence[int]) -> Pending:
        """`Comm.all_to_all` of embeddings or gradients, in the precision of the payload."""
        if not self._bf16:
            return self.comm.all_to_all(rows, send_rows, recv_rows)
        return Widened(self.comm.all_to_all(rows.bfloat16(), send_rows, recv_rows))

    def _send_to_all(self, rows: Tensor, copies: Copies) -> Pending:
        """`Comm.all_gather` likewise."""
        if not self._bf16:
            return self.comm.all_gather(rows, copies.received, copies.counts)
        return Widened(self.comm.all_gather(rows.bfloat16(), copies.received, copies.counts))

    def lookup_delta(self, route: Route, update: RowUpdate) -> Deltas:
        """What `update` would add to the rows of a group, `[2n, columns]`."""
        if route.local:
            own = route.unique if route.copies is None else route.copies.rows
            deltas = Deltas(update.values, update.unique.places_of(own))
            return deltas if self._whole_rows else _each(self._whole(deltas.dense()))
        places = update.unique.places_of(route.unique)[: sum(route.received)]
        if route.shown is not None and self._whole_rows:
            return deltas_of_touched(update.values, places, route, self.comm)
        buffer = self.comm.send_buffer(len(places), self.layout.width, update.values)
        changes = Deltas(update.values, places).dense(out=buffer)
        arrived = self.comm.all_to_all(changes, route.received, route.sent).wait()
        if not self._whole_rows:
            return _each(self._whole(gather_rows(arrived, route.answer_index)))
        if route.copies is None:
            return Deltas(arrived, route.answer_index)
        own = update.unique.places_of(route.copies.rows)
        index = own.new_empty(len(route.answer_index) + len(own))
        asked, held = self._asked_and_held(index, route)
        asked.copy_(route.answer_index)
        held.copy_(torch.where(own < 0, -1, own + len(arrived)))
        return Deltas(torch.cat([arrived, update.values]), index)

    def add(self, update: RowUpdate, scale: float | Tensor) -> None:
        """Adds `scale * update` to the rows it touches; nothing where the scale is 0."""
        if not isinstance(scale, float) or scale:
            self._note_changed(update.unique.rows)
            if self._shared is not None:
                self._shared.changed()
        add_rows(self.local_rows, update.unique.rows, update.values, scale)

    def step(self, gradient: RowUpdate) -> None:
        """One optimizer step on the touched rows."""
        self._note_changed(gradient.unique.rows)
        self.optimizer.update(self.local_rows, gradient.unique.rows, gradient.values)
        if self._shared is not None:
            self._shared.tell_written()

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
            # Every shard has the same ids; only the last may end with repetitions of its last row (`UniqueRows`).
            length = min(b - a for a, b in cuts)
            total = torch.stack([squares[a : a + length] for a, _ in cuts]).sum(0)
            group = self._owners[table.name]
            if group is not None:
                dist.all_reduce(total, group=group)
            for a, b in cuts:
                whole[a : a + length] = total
                whole[a + length : b] = total[-1:]
        return whole

    def _square_share(self, update: RowUpdate) -> float | Tensor:
        """This rank's share of the sum of squares over all ranks: each rank has the rows of replicated tables."""
        values = update.values
        for shard in self._copied:
            here = (update.unique.rows >= shard.base) & (update.unique.rows < shard.base + shard.rows)
            values = torch.where(here.unsqueeze(1), values / math.sqrt(self.comm.size), values)
        return square_sum(values) if update.unique.count is None else update.unique.square_sum(values)

    def _note_changed(self, rows: Tensor) -> None:
        if self.changed is not None:
            self.changed.index_fill_(0, rows, True)

    def _owner_groups(self) -> dict[str, dist.ProcessGroup | None]:
        """For each table cut into columns, the process group of its owners (None: one owner has them all)."""
        groups: dict[str, dist.ProcessGroup | None] = {}
        for table in self.layout.tables:
            if self.layout.sharding[table.name] == "column_wise":
                owners = sorted({shard.rank for shard in self.layout.of(table.name)})
                # On ranks outside the group this gives no group, and they never use it.
                groups[table.name] = cast(Any, dist.new_group(owners)) if len(owners) > 1 else None
        return groups

    def _whole(self, pieces: Tensor) -> Tensor:
        """Whole rows from their pieces, which are side by side."""
        return pieces.view(-1, self.columns)


def _each(deltas: Tensor) -> Deltas:
    """A delta of its own for every row."""
    return Deltas(deltas, torch.arange(len(deltas), device=deltas.device))


def _present(value: T | None) -> T:
    assert value is not None
    return value


def _mix(*numbers: int) -> int:
    """One well-mixed seed of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))
