"""`dns`: dynamic negative sampling (Zhang et al., SIGIR 2013): the hardest of several sampled candidates."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from invdist.config.registry import STRATEGIES
from invdist.embeddings.exchange import Exchange, Pairs
from invdist.learning.strategies.ns import NegativeSampling
from invdist.learning.strategy import TRAINING_LABELED, Batch, Phase, Record, Setting, unlabeled


@STRATEGIES.register("dns")
class DynamicNegativeSampling(NegativeSampling):
    """As `ns`, each unlabeled row being the one of `candidates` random pairs of a user that scores highest."""

    class Config(NegativeSampling.Config):
        """Options of dynamic negative sampling."""

        candidates: Annotated[int, Ge(2)] = 8
        """Random pairs of which the hardest becomes the negative (M of the paper)."""

    @classmethod
    def phases(cls, setting: Setting) -> tuple[Phase, ...]:
        per_row = setting.needed_rate() * setting.options.candidates
        return (Phase("train", TRAINING_LABELED, per_row, source="sampled"),)

    def groups(self, phase: Phase, batch: Batch) -> tuple[Pairs, ...]:
        return (self.model.ids_to_fetch(unlabeled(batch)),)

    def step(self, phase: Phase, batch: Batch, exchange: Exchange) -> Record:
        candidates = unlabeled(batch)
        with self.watch("candidates"):
            chosen = hardest(self.model.score_fetched(exchange, candidates), self.options.candidates)
        # A new exchange for the chosen: rows that were only looked at must not be moved by a lazy optimizer.
        return self.step_with(batch, Pairs(candidates.user[chosen], candidates.item[chosen]))


def hardest(logits: Tensor, candidates: int) -> Tensor:
    """Index of the largest of each run of `candidates` consecutive logits; the first of equals."""
    runs = logits.view(-1, candidates)
    # Where maxima tie, argmax may give any of them.
    first = (runs == runs.amax(1, keepdim=True)).int().argmax(1)
    return torch.arange(len(runs), device=logits.device) * candidates + first
