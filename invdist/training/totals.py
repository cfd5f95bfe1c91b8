"""What a run has done so far: sums over the present epoch and over the whole run. Both are checkpointed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from invdist.training.history import direction_name


@dataclass(slots=True)
class EpochTotals:
    """Sums over the steps of the present epoch. A resumed epoch continues them, so its event covers all of it."""

    loss: float = 0.0
    steps: int = 0
    rows: int = 0
    seconds: float = 0.0
    directions: dict[str, int] = field(default_factory=dict)
    seconds_by: dict[str, float] = field(default_factory=dict)

    @property
    def rows_per_s(self) -> float:
        """Labeled interactions per second."""
        return self.rows / max(self.seconds, 1e-9)

    @property
    def mean_loss(self) -> float:
        """Mean training loss of the steps so far."""
        return self.loss / max(self.steps, 1)

    def add_step(self, loss: float, rows: int, seconds: float, direction: float | None) -> None:
        """Adds a step over `rows` labeled interactions; `direction` is its multiplier if it chose one."""
        self.steps += 1
        self.rows += rows
        self.seconds += seconds
        self.loss += loss
        if direction is not None:
            _add(self.directions, {direction_name(direction): 1})

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        """Adds seconds by what they were spent on."""
        _add(self.seconds_by, seconds)

    def event(self) -> dict[str, Any]:
        """The fields of the `epoch` event that these sums give."""
        return {
            "seconds": self.seconds,
            "rows": self.rows,
            "rows_per_s": self.rows_per_s,
            "loss": self.mean_loss,
            "directions": self.directions,
            "seconds_by": self.seconds_by,
        }


@dataclass(slots=True)
class RunTotals:
    """Sums over the finished epochs of a run, and which epoch was the best."""

    best: float | None = None
    best_epoch: int | None = None
    stale: int = 0
    """Epochs since the best."""
    rows: int = 0
    seconds: float = 0.0
    directions: dict[str, int] = field(default_factory=dict)
    loss: float | None = None
    """Mean training loss of the last epoch."""

    def add_epoch(self, epoch: int, totals: EpochTotals, metric: float | None) -> bool:
        """Adds a finished epoch; True if its metric is the best so far. None: it is not one to choose from."""
        self.rows += totals.rows
        self.seconds += totals.seconds
        _add(self.directions, totals.directions)
        self.loss = totals.mean_loss
        if metric is None:
            return False
        improved = self.best is None or metric > self.best
        if improved:
            self.best, self.best_epoch, self.stale = metric, epoch, 0
        else:
            self.stale += 1
        return improved

    def event(self) -> dict[str, Any]:
        """The fields of the `final` event that these sums give."""
        return {
            "best_epoch": self.best_epoch,
            "rows_per_s": self.rows / max(self.seconds, 1e-9),
            "seconds": self.seconds,
            "directions": self.directions,
        }


def _add(sums: dict[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        sums[name] = sums.get(name, 0) + value
