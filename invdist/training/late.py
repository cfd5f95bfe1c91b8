"""What steps leave on a GPU, read by the host later and together, so that it does not wait for each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from invdist.embeddings.row_moves import reads_are_free
from invdist.learning.strategy import Phase, Record
from invdist.training.checkpoint import Position
from invdist.training.events import EventLog
from invdist.training.totals import EpochTotals

_MOMENT_S = 0.02


@dataclass(slots=True)
class Taken:
    """A step that was taken, and is not in the totals yet."""

    phase: Phase
    steps: int
    """Steps of the pass."""
    position: Position
    """The position after it."""
    record: Record
    rows: int
    """Labeled interactions, over all ranks."""
    seconds: float


class StepLog:
    """The steps that were taken since the last `flush`: up to `log_every` on a GPU.

    On a CPU those of a moment: to add up many at once takes less time, and nobody sees that a step is noted so late.
    """

    def __init__(self, events: EventLog, log_every: int, device: torch.device) -> None:
        self._events, self._log_every = events, log_every
        self._most_seconds = _MOMENT_S if reads_are_free(device) else math.inf
        self._taken: list[Taken] = []
        self._seconds = 0.0

    def add(self, taken: Taken) -> bool:
        """Keeps a step; True if it is time to flush."""
        self._taken.append(taken)
        self._seconds += taken.seconds
        return len(self._taken) >= self._log_every or self._seconds >= self._most_seconds

    def flush(
        self, totals: EpochTotals, rows_per_epoch: int, explained: Callable[[Phase, Callable[[], Any]], Any]
    ) -> None:
        """Adds the steps to the totals of the epoch. `explained` calls what may find that training has diverged.

        Writes the event of a step if it chose a direction, or every `log_every` steps.
        """
        taken, self._taken, self._seconds = self._taken, [], 0.0
        losses = read_scalars([each.record.loss for each in taken])
        for each, loss in zip(taken, losses, strict=True):
            position, details = each.position, explained(each.phase, each.record.read)
            direction = details.get("direction")
            totals.add_step(loss, each.rows, each.seconds, direction)
            if direction is not None or position.global_step % self._log_every == 0:
                self._events.write(
                    "step",
                    epoch=position.epoch,
                    phase=each.phase.name,
                    step=position.step,
                    steps=each.steps,
                    global_step=position.global_step,
                    loss=loss,
                    rows_per_s=totals.rows_per_s,
                    eta_s=max(0, rows_per_epoch - totals.rows) / totals.rows_per_s,
                    **details,
                )


def read_scalars(scalars: Sequence[Tensor]) -> list[float]:
    """The values of scalars on one device: the host waits for it once."""
    return torch.stack(list(scalars)).tolist() if scalars else []


class Answers:
    """Small answers of the ranks, one after the other: on a GPU each is read when the next is there.

    By then it has arrived, so the host does not wait for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._free, self._last = reads_are_free(device), None

    def next(self, answer: Tensor) -> list[float]:
        """Takes an answer; gives its values, or on a GPU those of the one before (zeros if it is the first)."""
        copy = HostCopy(answer)
        ready, self._last = (copy, None) if self._free else (self._last, copy)
        return [0.0] * len(answer) if ready is None else ready.read()


class HostCopy:
    """A small tensor on its way to the host. To read it later does not wait for what was launched in between."""

    def __init__(self, tensor: Tensor) -> None:
        self._event = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[float]:
        """Its values."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()
