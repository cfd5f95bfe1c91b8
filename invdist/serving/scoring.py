"""Scores of pairs by a frozen model, with a stated rule for pairs that it does not know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from invdist.models.frozen import FrozenModel
from invdist.serving.ids import UNKNOWN, RawIds
from invdist.serving.opened import OpenedRun
from invdist.serving.pairs import Pairs

Unknown = Literal["drop", "prior"]
_SCORED_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class Scorer:
    """Scores pairs of a data set, known or not.

    Of a pair whose user or item the data set does not have, `drop` leaves the row out and `prior` gives it the score
    `prior`: what is known of a pair without the model.
    """

    model: FrozenModel
    users: RawIds
    items: RawIds
    prior: float
    unknown: Unknown = "drop"

    @classmethod
    def of(cls, run: OpenedRun, unknown: Unknown = "drop") -> Scorer:
        """The scorer of an opened run."""
        return cls(run.model, run.users, run.items, run.prior, unknown)

    def score(self, pairs: Pairs) -> tuple[Pairs, np.ndarray, np.ndarray]:
        """(the rows that have a score, their scores as float32, which of them the model knows)."""
        known = (pairs.user != UNKNOWN) & (pairs.item != UNKNOWN)
        if self.unknown == "drop" and not known.all():
            pairs, known = pairs.where(known), known[known]
        scores = np.full(len(known), self.prior, np.float32)
        scores[known] = logits(self.model, pairs.user[known], pairs.item[known])
        return pairs, scores, known


def logits(model: FrozenModel, user: np.ndarray, item: np.ndarray) -> np.ndarray:
    """Logits (float32) of index pairs, a bounded number at a time."""
    scores = np.empty(len(user), np.float32)
    with torch.inference_mode():
        for start in range(0, len(user), _SCORED_ROWS):
            part = slice(start, start + _SCORED_ROWS)
            scores[part] = model(torch.from_numpy(user[part]), torch.from_numpy(item[part])).numpy()
    return scores
