"""Which rank is asked for which row: the route of one step's ids, found once and used for every exchange.

A row is asked for by the rank whose batch names it and answered by its owner. The route depends on ids only, so
that of the next batches is found while this batch is computed: making an `Exchange` counts, `advance` sends the ids,
`finish` receives them, and each of these messages travels in the background. Where a message tells its size
(`Comm.tells_sizes`), the ids are sent at once, behind their counts.

A table row is exchanged in *pieces*: the whole row, or one piece per column shard. The `n` pairs of a group ask for
`2n` rows (users first), that is `2n * pieces` pieces of `width` columns. Each distinct piece of a group travels
once: the rank that asks sends unique ids, and sums its gradients by id before it sends them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from invdist.embeddings.comm import Comm, Pending
from invdist.embeddings.locate import Pairs, RowLocator
from invdist.embeddings.row_moves import UniqueRows

__all__ = ["Exchange", "Pairs", "Route"]


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

    `=>` crosses ranks: ids and gradients to the right, rows and deltas back. With one rank, and on a replicated layout,
    rows need not travel: `held` has the local row of each piece of the batch.
    """

    pairs: int
    """Pairs of this group on this rank, n."""
    requested: Tensor
    """Local rows that gradients arrive for, in order of the rank that asks."""
    held: Tensor | None = None
    """The local row of each piece of the batch, where this rank holds all of them."""
    asked: UniqueRows | None = None
    """The distinct pieces of the batch by key (`RowLocator`); None with one rank."""
    joint_index: Tensor | None = None
    """Where the answer to all groups has each piece of the batch."""
    sent: list[int] = field(default_factory=list)
    """Distinct pieces asked of each rank."""
    received: list[int] = field(default_factory=list)
    """Pieces that each rank asks for."""
    features: Any = None
    """What is known ahead of the pairs of this group and never trained; passed on to `Recommender.logits`."""

    @property
    def answer_index(self) -> Tensor:
        """Where the answer to this group alone has each piece of the batch."""
        assert self.asked is not None
        return self.asked.inverse

    @cached_property
    def unique(self) -> UniqueRows:
        """The distinct rows of `requested`; sorted on first use, so that scoring never pays for it."""
        return UniqueRows.of(self.requested)


class Exchange:
    """The routes of all groups of one step, in three stages; each may be called again and then does nothing.

    `received` and `joint_requested` are what an answer to all groups at once needs.
    """

    def __init__(self, locate: RowLocator, comm: Comm, groups: Sequence[Pairs], replicated: bool) -> None:
        self._locate, self._comm, self._replicated = locate, comm, replicated
        self._pairs = [len(group.user) for group in groups]
        self._keys = [locate(group) for group in groups]
        self._counts: Pending | None = None
        self._ids: Pending | None = None
        self.routes: list[Route] = []
        if comm.size > 1:
            self._asked = [UniqueRows.of(keys) for keys in self._keys]
            edges = locate.edges
            if replicated:  # every rank gets every gradient
                by_group = [asked.below(edges[1:2]).expand(comm.size) for asked in self._asked]
            else:
                by_group = [torch.diff(asked.below(edges)) for asked in self._asked]
            self._sent = torch.stack(by_group, 1)  # [ranks, groups]
            if comm.tells_sizes:
                self._send_ids(comm.to_host(self._sent))
            else:
                each = [len(groups)] * comm.size
                self._counts = comm.all_to_all(self._sent.view(-1), each, each)

    def advance(self) -> Exchange:
        """Learns how much each rank asks for, and sends the ids."""
        if self._counts is None or self._ids is not None:
            return self
        self._received = self._counts.wait().view_as(self._sent)
        # The one point at which the host waits for the device: collectives take their split sizes as Python numbers.
        self._sizes = self._comm.to_host(torch.stack([self._sent, self._received]))  # [2, ranks, groups]
        self.received = self._sizes[1].sum(1).tolist()
        self._send_ids(self._sizes[0])
        return self

    def _send_ids(self, sizes: np.ndarray) -> None:
        """Sends the ids of all groups, of which `sizes` (`[ranks, groups]`) go to each rank."""
        groups, ranks = range(len(self._asked)), self._comm.size
        self.sent = sizes.sum(1).tolist()
        totals = (sizes[0] if self._replicated else sizes.sum(0)).tolist()
        self._asked = [self._asked[g].first(totals[g]) for g in groups]
        ids = [asked.rows % self._locate.stride for asked in self._asked]
        self._joint: list[Tensor | None] = [None for _ in groups]
        if self._replicated:
            send = torch.cat(ids).repeat(ranks)
        elif len(groups) == 1:
            send = ids[0]
        else:
            places = [_joint_places(self._sent, g, totals[g]) for g in groups]
            send = torch.empty(sum(totals), dtype=torch.int64, device=ids[0].device)
            for g in groups:
                send.index_copy_(0, places[g], ids[g])
                self._joint[g] = places[g]
        if not self._comm.tells_sizes:
            self._ids = self._comm.all_to_all(send, self.sent, self.received)
            return
        with_counts = zip(self._sent, send.split(self.sent), strict=True)
        send = torch.cat([part for counts_and_ids in with_counts for part in counts_and_ids])
        self._ids = self._comm.all_to_all(send, [len(groups) + sent for sent in self.sent])

    def _receive_ids(self) -> Tensor:
        assert self._ids is not None
        if not self._comm.tells_sizes:
            return self._ids.wait()
        groups = len(self._asked)
        parts = self._ids.use(lambda parts: [part.clone() for part in parts])
        self._received = torch.stack([part[:groups] for part in parts])
        self._sizes = self._comm.to_host(torch.stack([self._sent, self._received]))
        self.received = self._sizes[1].sum(1).tolist()
        return torch.cat([part[groups:] for part in parts])

    def finish(self) -> Exchange:
        """Receives the ids that are asked of this rank."""
        if self.routes:
            return self
        if self._comm.size == 1:
            self.routes = [Route(pairs, keys, held=keys) for pairs, keys in zip(self._pairs, self._keys, strict=True)]
            return self
        self.advance()
        self.joint_requested = self._receive_ids()
        for g, keys in enumerate(self._keys):
            asked, joint = self._asked[g], self._joint[g]
            requested = self.joint_requested
            if len(self._keys) > 1:
                places = _joint_places(self._received, g, int(self._sizes[1, :, g].sum()))
                requested = requested.index_select(0, places)
            joint_index = None
            if not self._replicated:
                joint_index = asked.inverse if joint is None else joint.index_select(0, asked.inverse)
            self.routes.append(
                Route(
                    self._pairs[g],
                    requested,
                    held=keys if self._replicated else None,
                    asked=asked,
                    joint_index=joint_index,
                    sent=self._sizes[0, :, g].tolist(),
                    received=self._sizes[1, :, g].tolist(),
                )
            )
        return self


def _joint_places(counts: Tensor, group: int, total: int) -> Tensor:
    """Where the pieces of a group are in a message that has, rank by rank, the pieces of every group.

    `counts` is `[ranks, groups]`; `total` is the number of pieces of the group. Gives `[total]`, by rank.
    """
    joint_start = counts.view(-1).cumsum(0).view_as(counts) - counts
    own_start = counts.cumsum(0) - counts
    shift = (joint_start - own_start)[:, group]
    by_piece = torch.repeat_interleave(shift, counts[:, group], output_size=total)
    return by_piece + torch.arange(total, device=counts.device)
