"""The boards on which ranks of one host announce their messages to each other, in memory that they share.

Every rank has a *board*, a ring of one line per message:

    number | buffer (file descriptor) | bytes of the buffer | where the part of each rank starts, and the end | values

and a ring in which it notes the messages it has read; its last word says whether the rank sleeps. `values` are those of
a small message, which then has no buffer. A rank that waits for a message looks for a while, then sleeps on a pipe, and
is woken through it.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from invdist.embeddings.kernels import kernels
from invdist.embeddings.shared_buffer import Buffer

LINES = 1024
"""Messages that may be on their way at once."""
SMALL_BYTES = 512
"""What fits a line."""
_LOOKS_US, _NAP_MS, _CHECK_S = 300, 2, 0.5
"""How long a rank looks before it sleeps, if each has a core; how long it sleeps if nobody wakes it; how often it
checks that all ranks live."""


class RankLost(RuntimeError):
    """Another rank ended, or did not answer in time."""


class Boards:
    """The boards of all ranks, seen from one. It writes on its own and reads all."""

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        self._rank, self._timeout_s, self._kernels = rank, timeout_s, kernels()
        self._looks_us = _LOOKS_US if size <= len(os.sched_getaffinity(0)) else 0
        self._words = 3 + size + 1
        self._line = self._words + SMALL_BYTES // 8
        self._done = LINES * self._line
        self._own = Buffer.new((LINES * (self._line + 1) + 1) * 8)
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)
        # Words as Python reads them fastest: lines, the message of each that was read last, whether the rank sleeps.
        self._of_ranks: list[memoryview] = []
        self._values: dict[torch.dtype, list[np.ndarray]] = {torch.float32: [], torch.float64: []}
        self._places: list[int] = []
        self._wakes: list[int] = []
        self.pids: list[int] = []
        """The process of each rank."""

    def address(self) -> tuple[int, int, int]:
        """Where the others find the board of this rank, and the pipe that wakes it."""
        return os.getpid(), self._own.fd, self._wake

    def open(self, addresses: Sequence[tuple[int, int, int]]) -> None:
        """Opens the boards of all ranks. Raises `OSError` where that is not possible."""
        for rank, (pid, fd, wake) in enumerate(addresses):
            board = self._own if rank == self._rank else Buffer.open(pid, fd, self._own.size)
            self._of_ranks.append(board.words())
            for dtype, of_ranks in self._values.items():
                of_ranks.append(board.tensor(dtype, 0, board.size // dtype.itemsize).numpy())
            self._places.append(board.address)
            self._wakes.append(os.open(f"/proc/{pid}/fd/{wake}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            self.pids.append(pid)

    def clear(self, number: int) -> None:
        """Waits until nobody reads the message any more whose line the one with this number will have."""
        before = self._of_ranks[self._rank][number % LINES * self._line]
        if before and not self.read_by_all(before):
            self._sleep(lambda: self.read_by_all(before), before)

    def enter(self, number: int, words: Sequence[int] = ()) -> None:
        """Enters a message: the words after its number, unless it has small values, which were written before."""
        board, line = self._of_ranks[self._rank], number % LINES * self._line
        for place, word in enumerate(words, line + 1):
            board[place] = word
        board[line] = number  # last: who sees the number may read the rest
        for rank, of_rank in enumerate(self._of_ranks):
            if of_rank[-1]:
                with contextlib.suppress(OSError):  # full: it is awake; closed: it ended, and `_sleep` finds out
                    os.write(self._wakes[rank], b"x")

    def is_small(self, tensor: Tensor) -> bool:
        """Whether the values of a tensor fit a line."""
        return tensor.nbytes <= SMALL_BYTES and tensor.dtype in self._values and tensor.is_contiguous()

    def values(self, number: int, like: Tensor) -> list[np.ndarray]:
        """The small values in the line of a message, by rank; that of this rank may be written before it is entered."""
        first = (number % LINES * self._line + self._words) * 8 // like.element_size()
        return [board[first : first + like.numel()] for board in self._values[like.dtype]]

    def words(self, rank: int, number: int) -> list[int]:
        """What a rank entered about a message, its number first; waits for it."""
        self.wait_for(rank, number)
        line = number % LINES * self._line
        return self._of_ranks[rank][line : line + self._words].tolist()

    def wait_for(self, rank: int, number: int) -> None:
        """Waits until a rank has entered a message."""
        board, line = self._of_ranks[rank], number % LINES * self._line
        if board[line] != number:
            place, looks = self._places[rank] + 8 * line, self._looks_us
            if self._kernels is None or not looks or not self._kernels.wait_for(place, number, looks):
                self._sleep(lambda: board[line] == number, number, rank)

    def mark_read(self, number: int) -> None:
        """Notes that this rank has read a message."""
        self._of_ranks[self._rank][self._done + number % LINES] = number

    def read_by_all(self, number: int) -> bool:
        """Whether all ranks have read a message."""
        word = self._done + number % LINES
        return min([board[word] for board in self._of_ranks]) >= number

    def _sleep(self, ready: Callable[[], bool], number: int, rank: int | None = None) -> None:
        """Sleeps until woken and `ready()`. Raises `RankLost` if a rank ended.

        A wake-up may be missed: the other rank may see the flag before it is set. So the sleep is short.
        """
        if ready():
            return
        started = checked = time.monotonic()
        board = self._of_ranks[self._rank]
        board[-1] = 1
        while not ready():
            if self._poll.poll(_NAP_MS):
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)
            now = time.monotonic()
            if now - checked > _CHECK_S:
                checked = now
                gone = [r for r, pid in enumerate(self.pids) if not _lives(pid)]
                if gone and not ready():
                    raise RankLost(f"rank {gone[0]} ended while rank {self._rank} waited for message {number}")
                if now - started > self._timeout_s:
                    whom = "the others" if rank is None else f"rank {rank}"
                    raise RankLost(f"rank {self._rank} waited {self._timeout_s:g} s for message {number} of {whom}")
        board[-1] = 0


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
