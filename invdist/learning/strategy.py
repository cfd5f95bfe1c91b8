"""What a strategy is. To add one, write a class like those beside this file and register it:

@STRATEGIES.register("mine")
class Mine(Strategy):
    class Config(Section):
        weight: float = 1.0
        \"\"\"Shown in --help and checked like every other field.\"\"\"

    @classmethod
    def phases(cls, setting): ...
    def groups(self, phase, batch): ...
    def step(self, phase, batch, exchange): ...
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from invdist.config.fields import Section
from invdist.data.schema import TRAINING_LABELED as TRAINING_LABELED  # for the files of strategies
from invdist.data.stream.batches import Batch
from invdist.embeddings.exchange import Exchange, Pairs
from invdist.learning.stopwatch import Stopwatch
from invdist.models.frozen import FrozenModel
from invdist.models.recommender import Recommender
from invdist.runtime.errors import UserError


class TrainingDiverged(UserError):
    """A loss is no longer finite, so a step has no sensible update to make."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One pass over some splits within an epoch."""

    name: str
    splits: tuple[str, ...]
    unlabeled_per_row: int = 0
    passes: int = 1
    source: str | None = None
    """Where unlabeled pairs come from; None: what `unlabeled.source` says."""
    part: tuple[int, int] = (0, 1)
    """`(i, n)`: only the i-th of n runs of steps of each pass. Phases that differ in nothing else share a pass."""

    def steps(self, of: int) -> range:
        """The steps it takes of a pass that has `of` steps."""
        i, n = self.part
        return range(of * i // n, of * (i + 1) // n)


@dataclass(slots=True)
class Setting:
    """What a strategy is built with."""

    options: Any
    """Its own Config."""
    unlabeled_rate: int
    gamma: float
    users: int
    items: int
    seed: int = 0

    def needed_rate(self) -> int:
        """`unlabeled_rate` for a strategy that has nothing to do without unlabeled rows."""
        if self.unlabeled_rate < 1:
            raise UserError("unlabeled.rate: 0 leaves this method nothing to learn from; expected at least 1")
        return self.unlabeled_rate


@dataclass(slots=True)
class Record:
    """What a step did, equal on every rank."""

    loss: Tensor
    """Mean over the interactions of the global batch."""
    details: dict[str, Any] = field(default_factory=dict)
    """Further figures; on a GPU complete after `read` only."""
    later: Callable[[], dict[str, Any]] | None = None
    """Reads the figures that are still on the GPU."""

    def read(self) -> dict[str, Any]:
        """All details. On a GPU the host waits for the step, so call it when something is logged, and always before a
        checkpoint is saved: a step that diverged is found here (on a CPU, by the step itself).
        """
        if self.later is not None:
            self.details |= self.later()
            self.later = None
        return self.details


class Strategy(ABC):
    """How labeled and unlabeled pairs become updates. One object per rank, in step with the others."""

    class Config(Section):
        """A strategy without options of its own."""

    reads_rows = True
    """Whether `score` reads the rows of the model. No exposure vectors are learned for a strategy that does not."""

    def __init__(self, setting: Setting, model: Recommender) -> None:
        self.options, self.setting, self.model = setting.options, setting, model
        self.watch = Stopwatch(getattr(model, "device", None))

    @classmethod
    @abstractmethod
    def phases(cls, setting: Setting) -> tuple[Phase, ...]:
        """What an epoch consists of. It follows from the settings alone, and so does whether the data can give it:
        that is checked before anything is started. Settings that do not go together are a `UserError`.
        """

    def groups(self, phase: Phase, batch: Batch) -> tuple[Pairs, ...]:
        """The pairs whose rows a step needs; by default the labeled ones, then the unlabeled ones if any."""
        labeled = Pairs(batch.user, batch.item)
        return (labeled, unlabeled(batch)) if phase.unlabeled_per_row else (labeled,)

    @abstractmethod
    def step(self, phase: Phase, batch: Batch, exchange: Exchange) -> Record:
        """Takes one step; `exchange` is that of `groups`."""

    def score(self, pairs: Pairs) -> Tensor:
        """Logits of pairs at the present state."""
        return self.model.score(pairs)

    @classmethod
    def frozen(cls, options: Any, users: int, state: Mapping[str, Tensor]) -> FrozenModel | None:
        """What `score` computes, as a model without ranks or optimizers; None: the trained rows and backbone.

        `options` is its Config, `state` what `state()` gave. A strategy that overrides `score` overrides this too, and
        so can be exported, annotated and recommended with.
        """
        if cls.score is not Strategy.score:
            raise UserError(
                f"{cls.__name__} overrides `score` but not `frozen`, so its runs cannot be exported: "
                "its class needs `frozen` beside `score`"
            )
        return None

    def end_epoch(self) -> None:  # noqa: B027 - most strategies have nothing to do
        """Called on every rank after the last phase of an epoch."""

    def state(self) -> Mapping[str, Tensor]:
        """Replicated state to checkpoint beside the model's: tensors by name, equal on every rank.

        Every rank calls it after the same step, so it may communicate.
        """
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what `state` gave."""
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, the checkpoint has {sorted(state)}")

    def grow_state(self, state: Mapping[str, Tensor], users: Tensor, items: Tensor) -> None:
        """Takes what `state` gave for an older data set, whose user i has the index `users[i]` now (-1: dropped).

        The rows of `sharded_state` are those of the present users already. A strategy whose state has something by
        user or item overrides this.
        """
        self.load_state(state)

    def sharded_state(self) -> Mapping[str, tuple[int, Tensor]]:
        """State with one row per user, cut over the ranks: (first user, live tensor `[users here, ...]`) by name.

        A checkpoint stores the rows by user and, at any number of ranks, writes them back into these tensors.
        """
        return {}

    def gamma_step(
        self,
        loss: Callable[[Tensor], Tensor | tuple[Tensor, Tensor]],
        exchange: Exchange,
        count: int | None = None,
    ) -> Record:
        """One gamma step on the mean over all ranks of `loss(logits)`, per-row losses of the one group of `exchange`.

        `count` is the number of this rank's rows that the mean is over; by default that of the losses given. Where only
        the device knows it, `loss` gives it, too.
        """
        with self.watch("pull"):
            rows = self.model.pull(exchange, distinct=[0])[0]
        with self.watch("step"):
            route = exchange.routes[0]
            found = loss(self.model.logits(rows, route))
            penalty = self.model.penalty(rows, route, route.pairs if count is None else count)
            losses, counted = found if isinstance(found, tuple) else (found, len(found) if count is None else count)
            gradient, mean = self.model.gradient(losses.sum(), counted, rows, route, penalty)
            self.model.step(gradient)
        return Record(mean)


def unlabeled(batch: Batch) -> Pairs:
    """The unlabeled pairs of a batch."""
    assert batch.unlabeled_user is not None
    assert batch.unlabeled_item is not None
    return Pairs(batch.unlabeled_user, batch.unlabeled_item)


def all_pairs(batch: Batch) -> Pairs:
    """Labeled pairs, then unlabeled ones, as one group."""
    other = unlabeled(batch)
    return Pairs(torch.cat([batch.user, other.user]), torch.cat([batch.item, other.item]))
