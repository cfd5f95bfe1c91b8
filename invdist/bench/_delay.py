"""Simulated latency between ranks of one host: a message arrives some time after the last rank has sent its part.

The clock of a host is one for all its processes, so every rank notes in shared memory when it sent which message.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from invdist.embeddings.comm import Comm, Pending, T

_LINES = 4096


class Late:
    """The latency of a communicator, which may change between messages."""

    def __init__(self, comm: Comm, path: str) -> None:
        self.seconds = 0.0
        self._rank, self._number = comm.rank, 0
        if comm.rank == 0:
            np.memmap(path, np.float64, "w+", shape=(comm.size, _LINES))
        comm.barrier()
        self._sent = np.memmap(path, np.float64, "r+", shape=(comm.size, _LINES))

    def wrap(self, send: Callable[..., Pending]) -> Callable[..., Pending]:
        """The same collective, later."""

        def sent_late(*args: Any) -> Pending:
            line, self._number = self._number % _LINES, self._number + 1
            self._sent[self._rank, line] = time.monotonic()
            return _LatePending(send(*args), lambda: float(self._sent[:, line].max()), self.seconds)

        return sent_late


class _LatePending(Pending):
    def __init__(self, inner: Pending, last_sent: Callable[[], float], seconds: float) -> None:
        self._inner, self._last_sent, self._seconds = inner, last_sent, seconds
        self._waits = True

    def wait(self) -> Tensor:
        return self._late(self._inner.wait())

    def use(self, function: Callable[[list[Tensor]], T]) -> T:
        return self._late(self._inner.use(function))

    def _late(self, arrived: T) -> T:
        if self._waits and self._seconds:
            # All ranks have sent by now, so their times are there.
            time.sleep(max(0.0, self._last_sent() + self._seconds - time.monotonic()))
        self._waits = False
        return arrived


def delay(comm: Comm, path: str) -> Late:
    """Makes the messages of `comm` late by what the result says; every rank calls it with the same file."""
    late = Late(comm, path)
    for name in ("all_to_all", "all_reduce"):
        setattr(comm, name, late.wrap(getattr(comm, name)))
    return late
