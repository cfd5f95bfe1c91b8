"""A strategy of somebody else, in one file: log-loss with smoothed labels."""

from __future__ import annotations

from invdist.config.fields import Section, Share
from invdist.config.registry import STRATEGIES
from invdist.embeddings.exchange import Exchange
from invdist.learning.losses import log_loss
from invdist.learning.strategy import TRAINING_LABELED, Batch, Phase, Record, Setting, Strategy


@STRATEGIES.register("smoothed")
class SmoothedLabels(Strategy):
    """Labels are pulled towards one half."""

    class Config(Section):
        """Options of label smoothing."""

        amount: Share = 0.1
        """How far labels are pulled: 0 leaves them, 1 makes all of them one half."""

    @classmethod
    def phases(cls, setting: Setting) -> tuple[Phase, ...]:
        return (Phase("train", TRAINING_LABELED),)

    def step(self, phase: Phase, batch: Batch, exchange: Exchange) -> Record:
        label = batch.label + self.options.amount * (0.5 - batch.label)
        return self.gamma_step(lambda logits: log_loss(logits, label), exchange)
