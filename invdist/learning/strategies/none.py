"""`none`: log-loss on the labeled rows, nothing else."""

from __future__ import annotations

from invdist.config.registry import STRATEGIES
from invdist.embeddings.exchange import Exchange
from invdist.learning.losses import log_loss
from invdist.learning.strategy import TRAINING_LABELED, Batch, Phase, Record, Setting, Strategy


@STRATEGIES.register("none")
class LogLoss(Strategy):
    """Plain supervised training: the baseline of every other strategy."""

    @classmethod
    def phases(cls, setting: Setting) -> tuple[Phase, ...]:
        return (Phase("train", TRAINING_LABELED),)

    def step(self, phase: Phase, batch: Batch, exchange: Exchange) -> Record:
        return self.gamma_step(lambda logits: log_loss(logits, batch.label), exchange)
