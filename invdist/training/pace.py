"""How fast a run learns at each of its steps: what all learning rates are multiplied by."""

from __future__ import annotations

from collections.abc import Sequence

from invdist.data.stream.batches import Stream
from invdist.learning.strategy import Phase
from invdist.training.checkpoint import Position


class Pace:
    """1 at every step, or `falling` from 2 to 0 in a straight line over the `epochs` from `first_epoch` on.

    Rates that do not fall leave the noise of the last steps in the weights. A run that grows has a number of epochs
    that is known before, so its rates can fall; the mean stays 1, for as much must be learned in as few steps. Then the
    last epoch is the one to use, whichever validation prefers.

    It follows from the position alone, so that a resumed run goes on with the same rates, at any number of ranks.
    """

    def __init__(
        self, phases: Sequence[Phase], streams: Sequence[Stream], first_epoch: int, epochs: int, *, falling: bool
    ) -> None:
        self._of_pass = [phase.steps(stream.steps) for phase, stream in zip(phases, streams, strict=True)]
        self._passes = [phase.passes for phase in phases]
        self._first_epoch, self._epochs, self.falling = first_epoch, epochs, falling

    @property
    def steps_per_epoch(self) -> int:
        """Steps of all phases of an epoch."""
        return sum(passes * len(steps) for passes, steps in zip(self._passes, self._of_pass, strict=True))

    def at(self, position: Position) -> float:
        """The pace of the step that is taken at a position."""
        if not self.falling:
            return 1.0
        before = zip(self._passes[: position.phase], self._of_pass, strict=False)
        done = sum(passes * len(steps) for passes, steps in before)
        steps = self._of_pass[position.phase]
        done += position.pass_index * len(steps) + position.step - steps.start
        epoch = position.epoch - self._first_epoch
        return max(0.0, 2 - 2 * (epoch + done / self.steps_per_epoch) / self._epochs)

    def chooses(self, epoch: int) -> bool:
        """Whether the model after an epoch may be the best one of the run: if rates fall, only the last."""
        return not self.falling or epoch + 1 >= self._first_epoch + self._epochs
