"""A warm start of the rows from exposures alone: what was shown together tells which items are alike.

Before the first epoch the rows learn to tell exposures from shuffled ones, by the plain product of their first k
columns. No label is used. Then items keep the vectors they learned, brought to one scale, and every user starts at
the same vector, so that the output layer first learns which *kinds* of items are liked, from far fewer labels than
each item would need for itself.

Shapes: `n` labeled rows of a step, `r` exposures for each, `k` the dimension of the backbone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor
from torch.nn.functional import softplus

from invdist.config.fields import CountOrZero, Positive, Section
from invdist.embeddings.exchange import Exchange, Pairs
from invdist.learning.strategy import TRAINING_LABELED, Batch, Phase, Record, Setting, Strategy, unlabeled
from invdist.models.recommender import Recommender
from invdist.runtime.errors import UserError

PHASE = "warmup"
_WARMED = "warmed"


class WarmupOptions(Section):
    """How rows are warmed before the first epoch."""

    passes: CountOrZero = 24
    """Passes over the labeled interactions, each with its exposures; 0: no warm start. Choose it so that every exposure
    is seen about ten times."""
    rate: Annotated[int, Ge(2)] = 8
    """Exposures for each labeled row of a step."""
    gamma: Positive = 0.01
    """Learning rate of the warm start."""
    scale: Positive = 1.0
    """Standard deviation that the item vectors are brought to."""
    start: Positive = 0.3
    """Every entry of the user vectors, afterwards."""


class Warmup(Strategy):
    """Put before a strategy in the bases of a class, it adds the warm start; `options.warmup` says how."""

    def __init__(self, setting: Setting, model: Recommender) -> None:
        super().__init__(setting, model)
        self._warmed = self.options.warmup.passes == 0
        if not self._warmed and not hasattr(model.backbone, "output"):
            raise UserError("the warm start needs a backbone with an `output` layer, as gmf and neumf have")

    @classmethod
    def phases(cls, setting: Setting) -> tuple[Phase, ...]:
        o = setting.options.warmup
        first = (Phase(PHASE, TRAINING_LABELED, o.rate, o.passes, source="exposures", epochs=1),) if o.passes else ()
        return (*first, *super().phases(setting))  # pyright: ignore[reportAbstractUsage] - of the strategy after it

    def groups(self, phase: Phase, batch: Batch) -> tuple[Pairs, ...]:
        return (_told_apart(batch, self.options.warmup.rate),) if phase.name == PHASE else super().groups(phase, batch)

    def step(self, phase: Phase, batch: Batch, exchange: Exchange) -> Record:
        if phase.name == PHASE:
            return self._warm(exchange)
        if not self._warmed:
            self._start()
        return super().step(phase, batch, exchange)  # pyright: ignore[reportAbstractUsage]

    def _warm(self, exchange: Exchange) -> Record:
        model, k = self.model, self._dim
        with self.watch("pull"):
            rows = model.pull(exchange)[0]
        with self.watch("step"):
            user, item = rows[:, :k].chunk(2)
            shown, shuffled = (user * item).sum(1).chunk(2)
            losses = softplus(-shown) + softplus(shuffled)
            # The dense parameters take no part, but a gradient is always of everything.
            nothing = sum(parameter.sum() for parameter in model.backbone.parameters()) * 0.0
            gradient, mean = model.gradient(losses.sum() + nothing, len(losses), rows, exchange.routes[0])
            optimizer: Any = model.rows.optimizer
            usual, optimizer.gamma = optimizer.gamma, self.options.warmup.gamma
            model.rows.step(gradient.rows)
            optimizer.gamma = usual
        return Record(mean)

    @torch.no_grad()
    def _start(self) -> None:
        """Ends the warm start: items to one scale, users to one vector, the optimizer and the output layer anew."""
        o, rows, k = self.options.warmup, self.model.rows, self._dim
        parts: dict[str, list[Tensor]] = {"user": [], "item": []}
        for shard in rows.layout.on(rows.comm.rank):
            wanted = max(0, min(shard.columns, k - shard.column))
            parts[shard.table].append(rows.local_rows[shard.base : shard.base + shard.rows, :wanted])
        sums = torch.zeros(2, dtype=torch.float64, device=rows.local_rows.device)
        for part in parts["item"]:
            sums += torch.stack([part.double().square().sum(), sums.new_tensor(part.numel())])
        square, count = rows.comm.all_reduce(sums).wait()
        for part in parts["item"]:
            part.mul_(o.scale / (square / count).sqrt().clamp(min=1e-12).float())
        for part in parts["user"]:
            part.fill_(o.start)
        for state in rows.optimizer.state.values():
            state.zero_()
        rows.optimizer.steps = 0
        output: Any = self.model.backbone.output
        output.weight[:, :k].zero_()
        self._warmed = True

    @property
    def _dim(self) -> int:
        backbone: Any = self.model.backbone
        return backbone.dim

    def state(self) -> Mapping[str, Tensor]:
        return {**super().state(), _WARMED: torch.tensor(float(self._warmed))}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self._warmed = bool(state[_WARMED])
        super().load_state({name: value for name, value in state.items() if name != _WARMED})


def _told_apart(batch: Batch, rate: int) -> Pairs:
    """The exposures of a batch, then the same users with the item of the next exposure of the same labeled row.

    So items are as popular among the shuffled pairs as among the shown, and the pairs of a row are the same on
    whatever rank the row is.
    """
    shown = unlabeled(batch)
    item = shown.item.view(-1, rate).roll(1, 1).reshape(-1)
    return Pairs(torch.cat([shown.user, shown.user]), torch.cat([shown.item, item]))
