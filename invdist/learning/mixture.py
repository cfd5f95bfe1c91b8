"""Strategies whose loss is a mean over labeled rows plus a weighted mean over unlabeled ones."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from invdist.config.fields import NonNegative, Section
from invdist.embeddings.exchange import Exchange, Pairs
from invdist.learning.losses import log_loss
from invdist.learning.strategy import TRAINING_LABELED, Batch, Phase, Record, Setting, Strategy, all_pairs


class Mixture(Strategy):
    """`mean log-loss of labeled rows + weight * mean loss of unlabeled rows`, both means over all ranks."""

    class Config(Section):
        """Options that every mixture has."""

        weight: NonNegative = 1.0
        """Weight of the mean loss of unlabeled rows beside that of labeled ones."""

    @abstractmethod
    def unlabeled_loss(self, logits: Tensor) -> Tensor:
        """The loss of each unlabeled pair, from its logit."""

    @classmethod
    def phases(cls, setting: Setting) -> tuple[Phase, ...]:
        return (Phase("train", TRAINING_LABELED, setting.needed_rate()),)

    def groups(self, phase: Phase, batch: Batch) -> tuple[Pairs, ...]:
        return (all_pairs(batch),)

    def step(self, phase: Phase, batch: Batch, exchange: Exchange) -> Record:
        return self.mixed_step(batch.label, exchange)

    def step_with(self, batch: Batch, chosen: Pairs) -> Record:
        """One step in which `chosen`, as many per labeled row as `unlabeled.rate` says, are the unlabeled pairs."""
        pairs = Pairs(torch.cat([batch.user, chosen.user]), torch.cat([batch.item, chosen.item]))
        with self.watch("exchange"):
            exchange = self.model.exchange(pairs).finish()
        return self.mixed_step(batch.label, exchange)

    def mixed_step(self, label: Tensor, exchange: Exchange) -> Record:
        """One gamma step; the one group of `exchange` is the labeled pairs, then the unlabeled ones."""
        n, rate = len(label), self.setting.unlabeled_rate
        scale = self.options.weight / rate

        def losses(logits: Tensor) -> Tensor:
            # Each labeled row has the same number of unlabeled ones, on every rank: dividing the sum by the
            # labeled rows alone gives both means exactly.
            assert len(logits) == n * (1 + rate)
            return torch.cat([log_loss(logits[:n], label), scale * self.unlabeled_loss(logits[n:])])

        return self.gamma_step(losses, exchange, count=n)
