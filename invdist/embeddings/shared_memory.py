"""Collectives through shared memory, for ranks on one host that compute on the CPU.

Gloo moves every message through TCP on the loopback interface: four copies and two wake-ups. Here the sender writes
its message into a shared buffer (`send_buffer`), or copies it there, and the receiver reads its parts in place (`use`),
or copies them out. Gloo is used once, to find each other. A rank reads the tables of the others in place (`share`).

A message is announced on the board of its rank (boards.py). Values to be summed that fit a line of it need no buffer.
A buffer is used again when all others have read it. Buffers are anonymous (`memfd_create`) and are opened by the others
through `/proc/PID/fd`, so nothing is left behind however a rank ends. Ranks must start the same collectives in the same
order; they may wait for them in any order.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import socket
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from invdist.embeddings.boards import LINES, Boards, RankLost
from invdist.embeddings.comm import Comm, Pending, T
from invdist.embeddings.shared_buffer import Buffer
from invdist.runtime.process import give_back

_SMALLEST = 1 << 16
_PIECE = 1 << 22
"""Values that are copied at once where a table moves to shared memory."""
_PREPARED = 16
"""Buffers that may be prepared at once."""


class SharedMemoryComm(Comm):
    """`Comm` through shared memory. Made by `connect`, on every rank at once."""

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        super().__init__(group, torch.device("cpu"))
        self.boards = Boards(self.rank, self.size, timeout_s)
        """To be opened on every rank before the first message."""
        self._number = 0
        self._opened: list[dict[int, Buffer]] = [{} for _ in range(self.size)]
        self._free: list[Buffer] = []
        self._prepared: dict[int, Buffer] = {}
        self._sent: dict[int, Buffer] = {}
        self._unread: dict[int, weakref.ref[_Arriving]] = {}

    def share(self, tensor: Tensor) -> list[Tensor] | None:
        """As `Comm.share`."""
        mine = Buffer.new(max(tensor.nbytes, 1))
        # Piece by piece: the peak of a rank is then its tables, and not twice that.
        copy, given = mine.tensor(tensor.dtype, 0, tensor.numel()), tensor.view(-1)
        for to, piece in zip(copy.split(_PIECE), given.split(_PIECE), strict=True):
            to.copy_(piece)
            give_back(piece)
        mine.use_huge_pages(mine.size)
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, (mine.fd, mine.size, tuple(tensor.shape)), group=self.group)
        tensor.untyped_storage().resize_(0)
        shared = [
            Buffer.open(pid, fd, size).tensor(tensor.dtype, 0, math.prod(shape)).view(shape)
            for pid, (fd, size, shape) in zip(self.boards.pids, said, strict=True)
        ]
        self.barrier()  # all have opened them: file descriptors are numbers that are used again
        os.close(mine.fd)
        return shared

    shows = True

    def all_to_all(self, send: Tensor, send_rows: Sequence[int], recv_rows: Sequence[int] | None = None) -> Pending:
        """As `Comm.all_to_all`."""
        row_bytes = send.element_size() * math.prod(send.shape[1:])
        edges = [0, *accumulate(rows * row_bytes for rows in send_rows)]
        number = self._publish(send, edges)
        self._count(edges[-1] - send_rows[self.rank] * row_bytes)
        return self._arriving(number, lambda: self._parts(number, send, recv_rows, row_bytes))

    def send_buffer(self, rows: int, width: int, like: Tensor) -> Tensor:
        """As `Comm.send_buffer`."""
        self._collect()
        while len(self._prepared) >= _PREPARED:  # for messages that were never sent
            self._free.append(self._prepared.pop(next(iter(self._prepared))))
        buffer = self._buffer(rows * width * like.element_size())
        self._prepared[buffer.address] = buffer
        return buffer.tensor(like.dtype, 0, rows * width).view(rows, width)

    def all_reduce(self, tensor: Tensor) -> Pending:
        """As `Comm.all_reduce`; every rank sums in order of rank, so all have the same bits."""
        if self.boards.is_small(tensor):
            number = self._publish_small(tensor)
            return self._arriving(number, lambda: [self._small_sum(number, tensor)])
        number = self._publish_to_all(tensor, tensor.nbytes * (self.size - 1))
        return self._arriving(number, lambda: [self._read_sum(number, tensor)])

    def all_gather(self, send: Tensor, recv_rows: Sequence[int], counts: Tensor) -> Pending:
        """As `Comm.all_gather`."""
        return self.show(send, send.nbytes * (self.size - 1))

    def show(self, tensor: Tensor, read: int) -> Pending:
        """As `Comm.show`."""
        number, like = self._publish_to_all(tensor, read), tensor[:0]

        def see() -> list[Tensor]:
            lines = [self.boards.words(rank, number) for rank in range(self.size)]
            parts = [
                self._open(rank, line).tensor(like.dtype, 0, line[-1] // like.element_size())
                for rank, line in enumerate(lines)
            ]
            return [part.view(-1, *like.shape[1:]) for part in parts]

        return self._arriving(number, see)

    def _publish_to_all(self, tensor: Tensor, read: int) -> int:
        """Enters a message with one part, of which all others together read so many bytes."""
        self._count(read)
        return self._publish(tensor, [0] + [tensor.nbytes] * self.size)

    def _arriving(self, number: int, read: Callable[[], list[Tensor]]) -> _Arriving:
        arriving = _Arriving(read, lambda: self._mark_read(number))
        self._unread[number] = weakref.ref(arriving)
        return arriving

    def _read_old(self) -> None:
        """Reads what nobody waited for yet, before its line is used again."""
        while self._unread and (number := next(iter(self._unread))) <= self._number - LINES // 2:
            arriving = self._unread[number]()
            if arriving is not None:
                arriving.keep()
            else:  # dropped
                self._mark_read(number)

    def _mark_read(self, number: int) -> None:
        self._unread.pop(number, None)
        self.boards.mark_read(number)

    def _publish_small(self, tensor: Tensor) -> int:
        """Enters a message that all others read and that fits its line. Gives its number."""
        number = self._next()
        self.boards.values(number, tensor)[self.rank][:] = tensor.detach().view(-1).numpy()
        self._count(tensor.nbytes * (self.size - 1))
        self.boards.enter(number)
        return number

    def _small_sum(self, number: int, tensor: Tensor) -> Tensor:
        for rank in range(self.size):
            self.boards.wait_for(rank, number)
        total, *more = self.boards.values(number, tensor)
        out = tensor.detach().view(-1).numpy()
        for each in more:
            total = np.add(total, each, out=out)
        return tensor

    def _next(self) -> int:
        """The number of the next message, whose line nobody reads any more."""
        number, self._number = self._number + 1, self._number + 1
        self._read_old()
        self.boards.clear(number)
        return number

    def _publish(self, tensor: Tensor, edges: Sequence[int]) -> int:
        """Copies a message into a buffer and enters it on the board. Gives its number."""
        number = self._next()
        buffer = self._prepared.pop(tensor.data_ptr(), None) if tensor.is_contiguous() else None
        if buffer is None:
            self._collect()
            buffer = self._buffer(edges[-1])
            if tensor.numel():
                buffer.tensor(tensor.dtype, 0, tensor.numel()).copy_(tensor.detach().reshape(-1))
        buffer.use_huge_pages(edges[-1])
        self._sent[number] = buffer
        self.boards.enter(number, (buffer.fd, buffer.size, *edges))
        return number

    def _parts(self, number: int, send: Tensor, recv_rows: Sequence[int] | None, row_bytes: int) -> list[Tensor]:
        """What each rank sent to this one, in the memory of its message."""
        parts = []
        for rank in range(self.size):
            line = self.boards.words(rank, number)
            start, stop = line[3 + self.rank], line[4 + self.rank]
            if recv_rows is not None and stop - start != recv_rows[rank] * row_bytes:
                raise RankLost(
                    f"rank {rank} sent {stop - start} bytes where {recv_rows[rank] * row_bytes} were expected"
                )
            part = self._open(rank, line).tensor(send.dtype, start, (stop - start) // send.element_size())
            parts.append(part.view(-1, *send.shape[1:]) if row_bytes else part.view(0, *send.shape[1:]))
        return parts

    def _read_sum(self, number: int, tensor: Tensor) -> Tensor:
        parts = [
            self._open(rank, self.boards.words(rank, number)).tensor(tensor.dtype, 0, tensor.numel())
            for rank in range(self.size)
        ]
        total = parts[0].clone()
        for part in parts[1:]:
            total.add_(part)
        return tensor.copy_(total.view_as(tensor))

    def _collect(self) -> None:
        """Takes back the buffers that all ranks have read."""
        for number in [number for number in self._sent if self.boards.read_by_all(number)]:
            self._free.append(self._sent.pop(number))

    def _buffer(self, size: int) -> Buffer:
        fitting = [buffer for buffer in self._free if buffer.size >= size]
        if fitting:
            buffer = min(fitting, key=lambda buffer: buffer.size)
            self._free.remove(buffer)
            return buffer
        buffer = Buffer.new(max(_SMALLEST, 1 << (size - 1).bit_length()) if size else _SMALLEST)
        self._opened[self.rank][buffer.fd] = buffer
        return buffer

    def _open(self, rank: int, line: Sequence[int]) -> Buffer:
        fd = line[1]
        buffer = self._opened[rank].get(fd)
        if buffer is None:
            buffer = self._opened[rank][fd] = Buffer.open(self.boards.pids[rank], fd, line[2])
        return buffer


class _Arriving(Pending):
    """A tensor that is read from the others when it is waited for: a part from each rank, or one of all."""

    def __init__(self, read: Callable[[], list[Tensor]], read_all: Callable[[], None]) -> None:
        self._read: Callable[[], list[Tensor]] | None = read
        self._done = read_all
        self._kept: list[Tensor] = []

    def wait(self) -> Tensor:
        if self._read is not None or len(self._kept) > 1:
            self._kept = [self.use(lambda parts: parts[0] if len(parts) == 1 else torch.cat(parts))]
        return self._kept[0]

    def keep(self) -> None:
        """Copies the parts out of memory that the ranks use again."""
        self._kept = self.use(lambda parts: [part.clone() for part in parts])

    def use(self, function: Callable[[list[Tensor]], T]) -> T:
        if self._read is None:
            return function(self._kept)
        found = function(self._read())
        self._read = None
        self._done()
        return found


def connect(group: dist.ProcessGroup | None = None, timeout_s: float = 600.0) -> Comm:
    """The fastest `Comm` of a process group; every rank must call it.

    Shared memory if all ranks are on this host and compute on the CPU (the group is gloo), else the group itself. Only
    on x86-64, whose stores other cores see in the order in which they were made.
    """
    plain = Comm(group)
    if plain.size == 1 or dist.get_backend(group) != "gloo":
        return plain
    comm = None
    if platform.machine() == "x86_64" and hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):  # memory that cannot be shared, in a sandbox
            comm = SharedMemoryComm(group, timeout_s)
    said: list[Any] = [None] * plain.size
    dist.all_gather_object(said, (socket.gethostname(), comm.boards.address() if comm else None), group=group)
    opened = 0.0
    if comm is not None and len({host for host, _ in said}) == 1 and all(address for _, address in said):
        try:
            comm.boards.open([address for _, address in said])
            opened = 1.0
        except OSError:  # another container on the same host
            pass
    everywhere = torch.tensor([opened])
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=group)
    return comm if comm is not None and everywhere.item() == 1.0 else plain
