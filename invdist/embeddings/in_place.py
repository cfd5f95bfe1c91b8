"""Ranks of one host read each other's rows, gradients and deltas where they are, in memory that they share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from invdist.embeddings.comm import Comm, Pending
from invdist.embeddings.exchange import Route
from invdist.embeddings.requests import request_kernels
from invdist.embeddings.row_moves import Deltas, set_gradient_memory


class SharedRows:
    """The local rows of all ranks.

    No rank reads rows that are being written: a step writes when it has the gradients of all ranks, which have read by
    then, and the next step reads when all ranks have written.
    """

    def __init__(self, of_ranks: Sequence[Tensor], comm: Comm) -> None:
        self.of_ranks, self._comm = of_ranks, comm
        self._written: Pending | None = None
        self._frozen = False

    def freeze(self) -> None:
        """Nobody changes rows from now on; every rank calls it."""
        self._comm.barrier()
        self._frozen = True

    def tell_written(self) -> None:
        """Tells the others that this rank has written its rows."""
        self._written = self._comm.all_reduce(self.of_ranks[0].new_empty(0))

    def wait_until_written(self) -> None:
        """Waits until all ranks have written what they changed."""
        if self._frozen:
            return
        if self._written is None:
            self.tell_written()
        assert self._written is not None
        self._written.wait()
        self._written = None

    def changed(self) -> None:
        """This rank has changed rows, and has not told so."""
        self._written = None


def with_gradient_memory(rows: Tensor, route: Route, comm: Comm) -> Tensor:
    """`rows`, whose gradient is written where other ranks read it, unless it is summed first."""
    if route.shown is None or (route.asked is not None and not route.distinct):
        return rows
    count, width = rows.shape
    return set_gradient_memory(rows, lambda: comm.send_buffer(count, width, rows))


def show_gradient(pieces: Tensor, route: Route, comm: Comm, *, bf16: bool) -> Pending:
    """Lets the owners of rows read a gradient: `Requests.gradients` says what of it belongs to which row."""
    if route.asked is not None and not route.distinct:
        pieces = route.asked.sum(pieces, out=comm.send_buffer(len(route.asked.rows), pieces.shape[1], pieces))
    pieces = pieces.bfloat16() if bf16 else pieces
    asked_of_others = sum(route.sent) - route.sent[comm.rank]
    return comm.show(pieces, asked_of_others * pieces.shape[1] * pieces.element_size())


def deltas_of_touched(values: Tensor, places: Tensor, route: Route, comm: Comm) -> Deltas:
    """The rows of an update that the pieces of this rank's batch are in, from their owners.

    `places` are those of the requests of all ranks in the `values` of this one, or -1: rows that are not touched do not
    travel.
    """
    kernels, place = request_kernels(), route.answer_index
    assert kernels is not None
    index = comm.send_buffer(len(places), 1, places).view(-1)
    rows = comm.send_buffer(len(places), values.shape[1], values)
    sizes = kernels.pack_deltas(places, route.received, values, index, rows)
    answers, arriving = comm.all_to_all(index, route.received, route.sent), comm.all_to_all(rows, sizes)

    def join(parts: list[Tensor]) -> Deltas:
        counts = [len(part) for part in parts]
        return Deltas(torch.cat(parts), answers.use(lambda found: kernels.join_deltas(found, counts, place)))

    return arriving.use(join)
