"""Which rank is asked for which row: the route of one step's ids, found once and used for every exchange.

A row is asked for by the rank whose batch names it and answered by its owner. The route depends on ids only, so
that of the next batches is found while this batch is computed: making an `Exchange` counts, `advance` sends the ids,
`finish` receives them, and each of these messages travels in the background. Ranks that share memory send their ids at
once (`requests.py`).

A table row is exchanged in *pieces*: the whole row, or one piece per column shard. The `n` pairs of a group ask for
`2n` rows (users first), that is `2n * pieces` pieces of `width` columns. Each distinct piece of a group travels
once: the rank that asks sends unique ids, and sums its gradients by id before it sends them. Of a replicated table
every rank has the rows; its gradients, and their ids, go to all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from invdist.embeddings import row_moves
from invdist.embeddings.comm import Comm, Pending, joint_places
from invdist.embeddings.locate import Pairs, RowLocator
from invdist.embeddings.requests import RequestKernels, Requests, request_kernels
from invdist.embeddings.row_moves import UniqueRows

__all__ = ["Exchange", "Pairs", "Route"]


@dataclass
class Copies:
    """The distinct pieces of one group that are in replicated tables: each rank gets the gradients of all."""

    rows: UniqueRows
    """Those of this rank, by local row."""
    received: list[int]
    """Pieces of each rank."""
    counts: Tensor
    """The same, on the device."""


@dataclass
class Route:
    r"""The way of one group's row pieces between the rank that asks and the ranks that own them.

    The rank that asks                                        An owner
                         answer_index
    pieces of the batch ---------------> distinct pieces ===> requested -------> distinct local rows
    [2n * pieces]        (joint_index,   (`asked`, by         (by rank that      (`unique`: gradients are
                         if all groups   owner, then row;     asks; local        summed, rows are updated)
                         are answered    `sent` to each)      rows; `received`
                         at once)                             from each)

    `=>` crosses ranks: ids and gradients to the right, rows and deltas back. With one rank, and of replicated tables,
    rows need not travel: `held` has the local row of each piece of the batch. The distinct pieces of replicated tables
    are in `copies` and not in `asked`; `requested` then ends with those of all ranks.
    """

    pairs: int
    """Pairs of this group on this rank, n."""
    requested: Tensor
    """Local rows that gradients arrive for, in order of the rank that asks; if they are `shown`, each once."""
    held: Tensor | None = None
    """The local row of each piece of the batch that this rank has anyway."""
    asked: UniqueRows | None = None
    """The distinct pieces that owners are asked for, by key (`RowLocator`).

    None if this rank has all, or if gradients are `shown` for each piece: nobody has sorted the pieces then.
    """
    copies: Copies | None = None
    """The distinct pieces of replicated tables, if there are several ranks."""
    keys: Tensor | None = None
    """The key of each piece of the batch that owners are asked for: ranks that share memory read it themselves."""
    row_bits: int = 0
    """Bits of a key that have the local row."""
    joint_places: Tensor | None = None
    """Where the answer to all groups has each distinct piece; None: it has no others."""
    distinct: bool = False
    """Whether the rows of this group, and gradients of them, are one for each distinct row and not for each pair."""
    sent: list[int] = field(default_factory=list)
    """Distinct pieces asked of each rank."""
    received: list[int] = field(default_factory=list)
    """Pieces that each rank asks for."""
    shown: Requests | None = None
    """Where gradients are in the memory of ranks, if they show them (`Comm.show`); None: they send them."""
    features: Any = None
    """What is known ahead of the pairs of this group and never trained; passed on to `Recommender.logits`."""

    @property
    def local(self) -> bool:
        """Whether this rank has the rows of all pieces, and asks no other."""
        return self.asked is None and self.shown is None

    @property
    def answer_index(self) -> Tensor:
        """Where the answer to this group alone has each piece of the batch."""
        if self.asked is not None:
            return self.asked.inverse
        kernels = request_kernels()
        assert kernels is not None
        assert self.keys is not None
        return kernels.answer_places(self.keys, self.row_bits, self.sent)

    @property
    def joint_index(self) -> Tensor:
        """Where the answer to all groups has each piece of the batch."""
        inverse = self.answer_index
        return inverse if self.joint_places is None else self.joint_places.index_select(0, inverse)

    @property
    def pieces(self) -> UniqueRows:
        """The distinct pieces of the batch on this rank, unless some are in replicated tables."""
        return self.unique if self.asked is None else self.asked

    @cached_property
    def unique(self) -> UniqueRows:
        """The distinct rows of `requested`; sorted on first use, so that scoring never pays for it."""
        return UniqueRows.of(self.requested) if self.shown is None else self.shown.unique


class Exchange:
    """The routes of all groups of one step, in three stages; each may be called again and then does nothing.

    `received` and `joint_requested` are what an answer to all groups at once needs.
    """

    def __init__(
        self, locate: RowLocator, comm: Comm, groups: Sequence[Pairs], *, sums: bool = False, exact: bool = False
    ) -> None:
        """`sums`: ranks always sum their gradients by distinct piece before others see them.

        `exact`: whether pieces repeat is counted, for `Route.distinct`, and not estimated.
        """
        self._locate, self._comm = locate, comm
        self._pairs = [len(group.user) for group in groups]
        self._counts: Pending | None = None
        self._ids: Pending | None = None
        self._joint: list[Tensor] = []
        self.routes: list[Route] = []
        if comm.size == 1:
            self._keys = [locate(group) for group in groups]
            return
        # A column for the pieces of each group that owners are asked for, then one for those in replicated tables.
        keys = {kind: [locate(group, replicated=kind) for group in groups] for kind in locate.kinds}
        self._asks, self._held = len(keys.get(False, ())), keys.get(True)
        self._asked_keys = keys.get(False, [])
        reads = row_moves.reads_are_free(locate.edges.device)
        self._kernels = request_kernels() if comm.shows and reads and self._held is None else None
        if self._kernels is not None:
            self._sort_repeated(self._kernels, sums, exact)
            asked = [k if s is None else s.rows for k, s in zip(self._asked_keys, self._sorted, strict=True)]
            ready, sizes, self._asked_of = self._kernels.pack(asked, comm.size, locate.row_bits, self._message)
            self._ids = comm.all_to_all(ready, sizes)
            return
        self._columns = [UniqueRows.of(each) for of_kind in keys.values() for each in of_kind]
        asked, copied = self._columns[: self._asks], self._columns[self._asks :]
        counts = [torch.diff(each.below(locate.edges)) for each in asked]
        counts += [each.below(locate.edges[1:2]).expand(comm.size) for each in copied]
        self._sent = torch.stack(counts, 1)  # [ranks, columns]
        each = [len(counts)] * comm.size
        self._counts = comm.all_to_all(self._sent.view(-1), each, each)

    def _sort_repeated(self, kernels: RequestKernels, sums: bool, exact: bool) -> None:
        """Sorts the pieces of the groups in which many pairs have the same row: this rank sums their gradients.

        The owner of a popular row would do all the work.
        """
        self._sorted: list[UniqueRows | None] = []
        for keys in self._asked_keys:
            column = UniqueRows.of(keys) if sums or exact or kernels.repeat(keys) else None
            if column is not None and exact and not (sums or column.repeats):
                column = None
            self._sorted.append(column)

    def _message(self, words: int) -> Tensor:
        return self._comm.send_buffer(words, 1, self._asked_keys[0]).view(-1)

    def advance(self) -> Exchange:
        """Learns how much each rank asks for, and sends the ids."""
        if self._counts is None or self._ids is not None:
            return self
        self._received = self._counts.wait().view_as(self._sent)
        # The one point at which the host waits for the device: collectives take their split sizes as Python numbers.
        self._sizes = self._comm.to_host(torch.stack([self._sent, self._received]))  # [2, ranks, columns]
        self.received = self._sizes[1, :, : self._asks].sum(1).tolist()
        self._send_ids(self._sizes[0])
        return self

    def _send_ids(self, sizes: np.ndarray) -> None:
        """Sends the ids of all columns, of which `sizes` (`[ranks, columns]`) go to each rank."""
        asks, ranks = self._asks, self._comm.size
        in_message = sizes.sum(1).tolist()
        self.sent = sizes[:, :asks].sum(1).tolist()
        totals = [*sizes[:, :asks].sum(0).tolist(), *sizes[0, asks:].tolist()]
        self._columns = [column.first(total) for column, total in zip(self._columns, totals, strict=True)]
        ids = [column.rows % self._locate.stride for column in self._columns[:asks]]
        ids += [(column.rows - self._locate.first_copy).repeat(ranks) for column in self._columns[asks:]]
        if len(ids) == 1:
            send = ids[0]
        else:
            places = joint_places(self._sent, [len(each) for each in ids])
            send = torch.empty(sum(in_message), dtype=torch.int64, device=ids[0].device)
            for place, each in zip(places, ids, strict=True):
                send.index_copy_(0, place, each)
            if asks > 1:
                self._joint = places if asks == len(ids) else joint_places(self._sent[:, :asks], totals[:asks])
        self._ids = self._comm.all_to_all(send, in_message, self._sizes[1].sum(1).tolist())

    def finish(self) -> Exchange:
        """Receives the ids that are asked of this rank."""
        if self.routes:
            return self
        if self._comm.size == 1:
            self.routes = [Route(pairs, keys, held=keys) for pairs, keys in zip(self._pairs, self._keys, strict=True)]
            return self
        if self._kernels is not None:
            self.routes = self._shown_routes(self._kernels)
            return self
        self.advance()
        assert self._ids is not None
        requested = [self._ids.wait()]
        self.joint_requested = requested[0]
        if len(self._columns) > 1:
            places = joint_places(self._received, self._sizes[1].sum(0).tolist())
            requested = [requested[0].index_select(0, place) for place in places]
        if self._held is not None and self._asks:
            asked, copied = self._received.split([self._asks, len(self._columns) - self._asks], 1)
            (places,) = joint_places(torch.stack([asked.sum(1), copied.sum(1)], 1), [sum(self.received)])
            self.joint_requested = self.joint_requested.index_select(0, places)
        self.routes = [self._route(group, requested) for group in range(len(self._pairs))]
        return self

    def _shown_routes(self, kernels: RequestKernels) -> list[Route]:
        assert self._ids is not None
        of_groups = self._ids.use(lambda messages: kernels.requests(messages, len(self._pairs)))
        return [
            Route(
                pairs,
                shown.unique.rows,
                asked=self._sorted[group],
                keys=self._asked_keys[group],
                row_bits=self._locate.row_bits,
                sent=self._asked_of[group],
                received=shown.received,
                shown=shown,
            )
            for group, (pairs, shown) in enumerate(zip(self._pairs, of_groups, strict=True))
        ]

    def _route(self, group: int, requested: Sequence[Tensor]) -> Route:
        columns, asked, copies, arriving = self._columns, {}, None, []
        if self._asks:
            asked = {
                "asked": columns[group],
                "keys": self._asked_keys[group],
                "joint_places": self._joint[group] if self._joint else None,
                "sent": self._sizes[0, :, group].tolist(),
                "received": self._sizes[1, :, group].tolist(),
            }
            arriving.append(requested[group])
        if self._held is not None:
            column = self._asks + group
            copies = Copies(columns[column], self._sizes[1, :, column].tolist(), self._received[:, column])
            arriving.append(requested[column] + self._locate.first_copy)
        held = None if self._held is None else self._held[group]
        local = arriving[0] if len(arriving) == 1 else torch.cat(arriving)
        return Route(self._pairs[group], local, held, copies=copies, **asked)
