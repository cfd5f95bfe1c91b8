"""`means`: no learning. The log-odds of a user's and an item's smoothed means: the floor of every table."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from invdist.config.fields import Positive, Section
from invdist.config.registry import STRATEGIES
from invdist.embeddings.exchange import Exchange, Pairs
from invdist.learning.log_odds import SMOOTHING, overall_mean, smoothed_log_odds
from invdist.learning.losses import log_loss
from invdist.learning.strategy import TRAINING_LABELED, Batch, Phase, Record, Setting, Strategy
from invdist.models.frozen import Additive, FrozenModel
from invdist.models.recommender import Recommender


@STRATEGIES.register("means")
class Means(Strategy):
    """`logit(p_u) + logit(p_i) - logit(p)`, counted over the labeled rows of an epoch; the model is not touched."""

    class Config(Section):
        """Options of the means."""

        smoothing: Positive = SMOOTHING
        """Rows at the overall mean that are added to each user and each item."""

    reads_rows = False

    def __init__(self, setting: Setting, model: Recommender) -> None:
        super().__init__(setting, model)
        # Rows and positives of every user, then of every item: those of the last whole epoch, and those that this
        # rank has counted in the present one.
        self._use(torch.zeros((setting.users + setting.items, 2), dtype=torch.float64, device=model.device))
        self._counting = torch.zeros_like(self._counts)

    @classmethod
    def phases(cls, setting: Setting) -> tuple[Phase, ...]:
        return (Phase("count", TRAINING_LABELED),)

    def groups(self, phase: Phase, batch: Batch) -> tuple[Pairs, ...]:
        nothing = batch.user[:0]
        return (Pairs(nothing, nothing),)

    def step(self, phase: Phase, batch: Batch, exchange: Exchange) -> Record:
        exchange.finish()
        row = torch.stack([torch.ones_like(batch.label), batch.label], 1).double()
        at = torch.cat([batch.user, batch.item + self.setting.users])
        self._counting.index_add_(0, at, row.repeat(2, 1))
        losses = log_loss(self.score(Pairs(batch.user, batch.item)), batch.label)
        total = torch.stack([losses.sum(), losses.new_tensor(len(losses))])
        loss, rows = self.model.comm.all_reduce(total).wait()
        return Record(loss / rows)

    def end_epoch(self) -> None:
        self._use(self.model.comm.all_reduce(self._counting).wait())
        self._counting = torch.zeros_like(self._counts)

    def score(self, pairs: Pairs) -> Tensor:
        return self._logit[pairs.user] + self._logit[pairs.item + self.setting.users] - self._overall

    @classmethod
    def frozen(cls, options: Config, users: int, state: Mapping[str, Tensor]) -> FrozenModel:
        logit, overall = _log_odds(state["counts"], users, options.smoothing)
        return FrozenModel(logit[:users, None].clone(), logit[users:, None].clone(), Additive(overall))

    def state(self) -> Mapping[str, Tensor]:
        # What was counted so far goes to the first rank, so that it is counted once after loading, too.
        counted = self.model.comm.all_reduce(self._counting).wait()
        self._keep_counting(counted)
        return {"counts": self._counts, "counting": counted}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        counts, counted = (state[name].to(self.model.device) for name in ("counts", "counting"))
        self._use(counts)
        self._keep_counting(counted)

    def grow_state(self, state: Mapping[str, Tensor], users: Tensor, items: Tensor) -> None:
        index = torch.cat([users, torch.where(items < 0, items, items + self.setting.users)])
        grown = {name: torch.zeros_like(self._counts, device="cpu") for name in state}
        for name, counts in state.items():
            grown[name][index[index >= 0]] = counts[index >= 0]
        self.load_state(grown)

    def _keep_counting(self, counted: Tensor) -> None:
        first = self.model.comm.rank == 0
        self._counting = counted.clone() if first else torch.zeros_like(counted)

    def _use(self, counts: Tensor) -> None:
        """Makes scores from whole counts."""
        self._counts = counts
        self._logit, self._overall = _log_odds(counts, self.setting.users, self.options.smoothing)


def _log_odds(counts: Tensor, users: int, smoothing: float) -> tuple[Tensor, Tensor]:
    """Log-odds of the smoothed mean of every user, then of every item; and of the overall mean."""
    rows, positives = counts.unbind(1)
    overall = overall_mean(rows[:users].sum(), positives[:users].sum())
    return smoothed_log_odds(counts, overall, smoothing), torch.logit(overall).float()
