"""Collectives of one process group, with a count of what they send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass(slots=True)
class Traffic:
    """What this rank has sent to others so far."""

    collectives: int = 0
    bytes: int = 0


class Pending:
    """A tensor that arrives when `wait` is called."""

    def __init__(self, tensor: Tensor, work: dist.Work | None = None) -> None:
        self._tensor, self._work = tensor, work

    def wait(self) -> Tensor:
        """Blocks until the tensor is complete, and gives it. On a GPU the stream waits, not the host."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._tensor

    def use(self, function: Callable[[list[Tensor]], T]) -> T:
        """`function` of what arrived, in one or more parts one after the other; it must not keep them.

        Parts may be in memory that is used again afterwards, so nothing need be copied.
        """
        return function([self.wait()])


class _Unpadded(Pending):
    """Some rows of a tensor that arrives."""

    def __init__(self, tensor: Tensor, work: dist.Work | None, rows: Tensor) -> None:
        super().__init__(tensor, work)
        self._rows = rows

    def wait(self) -> Tensor:
        return super().wait().index_select(0, self._rows)


class Widened(Pending):
    """What arrives in bf16, as float32."""

    def __init__(self, inner: Pending) -> None:
        self._inner = inner

    def wait(self) -> Tensor:
        return self._inner.wait().float()


def use_all(pending: Sequence[Pending], function: Callable[[list[Tensor]], T]) -> T:
    """`function` of the parts of everything that arrives, one after the other."""
    if len(pending) == 1:
        return pending[0].use(function)
    return pending[0].use(lambda parts: use_all(pending[1:], lambda more: function([*parts, *more])))


def joint_places(counts: Tensor, totals: Sequence[int]) -> list[Tensor]:
    """Where the pieces of each group are in a message that has, rank by rank, the pieces of every group.

    `counts` is `[ranks, groups]`; `totals` are the numbers of pieces of the first groups. Gives `[total]` for each of
    them, by rank.
    """
    joint_start = counts.reshape(-1).cumsum(0).view(counts.shape) - counts
    shift = joint_start - counts.cumsum(0) + counts
    return [
        torch.repeat_interleave(shift[:, group], counts[:, group], output_size=total)
        + torch.arange(total, device=counts.device)
        for group, total in enumerate(totals)
    ]


class Comm:
    """The ranks that train together: `rank`, `size`, and the collectives that training needs.

    With one rank nothing is sent and tensors pass through. `device` is where `barrier` has its tensor: NCCL moves
    GPU memory only.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.device = device
        self.traffic = Traffic()

    def send_buffer(self, rows: int, width: int, like: Tensor) -> Tensor:
        """Memory for `[rows, width]` values that `all_to_all` sends without another copy, if it is called soon."""
        return like.new_empty((rows, width))

    def share(self, tensor: Tensor) -> list[Tensor] | None:
        """Moves a matrix of each rank to memory that all ranks can read. Gives all of them, by rank.

        The memory of `tensor` is given back. None where ranks share no memory: nothing is moved.
        """
        del tensor
        return None

    shows = False
    """Whether ranks read each other's memory: `show`, and `all_to_all` without `recv_rows`, whose parts then have the
    sizes that were sent."""

    def show(self, tensor: Tensor, read: int) -> Pending:
        """Lets all ranks read a tensor, of which they read about `read` bytes; `Pending.use` gets that of each rank."""
        raise NotImplementedError

    def all_to_all(self, send: Tensor, send_rows: Sequence[int], recv_rows: Sequence[int] | None = None) -> Pending:
        """Sends `send_rows[r]` leading rows of `send`, in order of rank, to each rank r; receives likewise."""
        if self.size == 1:
            return Pending(send)
        assert recv_rows is not None, "see shows"
        recv = send.new_empty((sum(recv_rows), *send.shape[1:]))
        work = dist.all_to_all_single(
            recv, send.contiguous(), list(recv_rows), list(send_rows), group=self.group, async_op=True
        )
        row_bytes = send.element_size() * (send[0].numel() if len(send) else 0)
        self._count((sum(send_rows) - send_rows[self.rank]) * row_bytes)
        return Pending(recv, work)

    def all_gather(self, send: Tensor, recv_rows: Sequence[int], counts: Tensor) -> Pending:
        """Sends all rows of `send` to every rank; receives `recv_rows[r]` rows of each rank r, in order of rank.

        `counts` has `recv_rows` on the device. NCCL and gloo gather equal parts, so all are filled up to the longest.
        """
        longest, total = max(recv_rows), sum(recv_rows)
        if self.size == 1 or not longest:
            return Pending(send)
        padded = send.new_empty((longest, *send.shape[1:]))
        padded[: len(send)] = send
        recv = send.new_empty((self.size * longest, *send.shape[1:]))
        work = dist.all_gather_single(recv, padded, group=self.group, async_op=True)
        self._count((self.size - 1) * send.nbytes)
        return _Unpadded(recv, work, joint_places(torch.stack([counts, longest - counts], 1), [total])[0])

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Sums `tensor` over the ranks, in place."""
        if self.size == 1:
            return Pending(tensor)
        # A ring sends every element twice, less its own share.
        self._count(2 * tensor.numel() * tensor.element_size() * (self.size - 1) // self.size)
        return Pending(tensor, dist.all_reduce(tensor, group=self.group, async_op=True))

    def to_host(self, tensor: Tensor) -> np.ndarray:
        """Reads a small tensor on the host. On a GPU the host waits for it: once per exchange, for split sizes."""
        return tensor.cpu().numpy()

    def barrier(self) -> None:
        """Waits for every rank."""
        if self.size > 1:
            device = self.device or ("cuda" if dist.get_backend(self.group) == "nccl" else "cpu")
            self.all_reduce(torch.zeros(1, device=device)).wait()

    def _count(self, sent: int) -> None:
        self.traffic.collectives += 1
        self.traffic.bytes += sent
