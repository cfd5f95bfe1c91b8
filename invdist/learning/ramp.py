"""A value that grows with the steps of a run."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Ramp:
    """Grows linearly from 0 at the first step to `limit` after `steps` steps, and stays there."""

    def __init__(self, limit: float, steps: int) -> None:
        self.limit, self.steps = limit, steps
        self.done = 0

    def next(self) -> float:
        """The value of the present step; the next call is for the next step."""
        value = self.limit * min(1.0, self.done / self.steps)
        self.done += 1
        return value

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        return {"steps": torch.tensor(self.done)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what `state` gave."""
        self.done = int(state["steps"])
