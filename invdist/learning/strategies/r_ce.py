"""`r_ce`: reweighted cross-entropy (Wang et al., WSDM 2021): rows that fit badly count less."""

from __future__ import annotations

import torch

from invdist.config.fields import NonNegative, Section
from invdist.config.registry import STRATEGIES
from invdist.embeddings.exchange import Exchange
from invdist.learning.losses import log_loss
from invdist.learning.strategy import TRAINING_LABELED, Batch, Phase, Record, Setting, Strategy


@STRATEGIES.register("r_ce")
class ReweightedLogLoss(Strategy):
    """Positives are weighted by p^b, negatives by (1-p)^b; no gradient goes through the weight."""

    class Config(Section):
        """Options of the reweighted loss."""

        b: NonNegative = 0.2
        """Exponent of the weight; 0 is plain log-loss."""

    @classmethod
    def phases(cls, setting: Setting) -> tuple[Phase, ...]:
        return (Phase("train", TRAINING_LABELED),)

    def step(self, phase: Phase, batch: Batch, exchange: Exchange) -> Record:
        def weighted(logits: torch.Tensor) -> torch.Tensor:
            losses = log_loss(logits, batch.label)
            # The log-loss of a row is -log of the probability of its own label, which is what is raised to b.
            return torch.exp(-self.options.b * losses.detach()) * losses

        return self.gamma_step(weighted, exchange)
