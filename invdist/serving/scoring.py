"""Scores of pairs by a frozen model, with one rule for pairs that it does not know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from invdist.models.frozen import FrozenModel, score_in_tiles
from invdist.runtime.errors import UserError
from invdist.runtime.process import one_thread
from invdist.serving.inputs import COUNTS, MatchedPairs, PairSource
from invdist.serving.raw_ids import RawIds
from invdist.serving.run import TrainedRun
from invdist.serving.sharded.remote import RemoteModel

Unknown = Literal["null", "prior", "drop"]
_SCORED_ROWS = 1 << 13
PairLogits = Callable[[FrozenModel, Tensor, Tensor], Tensor]
"""Logits of a model for pairs of indices."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """Scores pairs, known or not. A pair is unknown if the data set lacks its user or its item.

    There is one row for each pair given, in order. An unknown pair has no score with `null`, the score `prior` with
    `prior`, and no row with `drop`.
    """

    model: FrozenModel | RemoteModel
    users: RawIds
    items: RawIds
    prior: float
    unknown: Unknown = "null"

    @classmethod
    def of(cls, run: TrainedRun, unknown: Unknown = "null") -> Scorer:
        """The scorer of a run."""
        if unknown not in get_args(Unknown):
            raise UserError(f"unknown={unknown!r}: expected {', '.join(get_args(Unknown))}")
        return cls(run.model, run.users, run.items, run.prior, unknown)

    def score(self, pairs: MatchedPairs) -> tuple[MatchedPairs, np.ndarray, np.ndarray]:
        """(the rows to give, their scores as float32, which of them the model knows)."""
        known = pairs.known
        return self.filled(pairs, logits(self.model, pairs.user[known], pairs.item[known]))

    def filled(self, pairs: MatchedPairs, known_scores: np.ndarray) -> tuple[MatchedPairs, np.ndarray, np.ndarray]:
        """The same, from the scores of the known pairs."""
        known = pairs.known
        if self.unknown == "drop" and not known.all():
            pairs, known = pairs.where(known), known[known]
        scores = np.full(len(known), self.prior, np.float32)
        scores[known] = known_scores
        return pairs, scores, known

    def column(self, values: np.ndarray, known: np.ndarray) -> pa.Array:
        """A column of values that follow from scores: null where there is no score."""
        return pa.array(values, mask=~known if self.unknown == "null" else None)


class ScoreTables:
    """Tables of scored pairs: `user`, `item` (raw), `score` (logit), `probability`, `known`; and counts of rows."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self.counts = Counter[str](dict.fromkeys((*COUNTS, "scored"), 0))
        self.schema = pa.schema(
            [
                pa.field("user", scorer.users.type),
                pa.field("item", scorer.items.type),
                pa.field("score", pa.float32()),
                pa.field("probability", pa.float32()),
                pa.field("known", pa.bool_()),
            ]
        )

    def of(self, source: PairSource) -> Iterator[pa.Table]:
        """The tables of an input, in its order."""
        for part in source.parts:
            for pairs in source.read(part, self.scorer.users, self.scorer.items):
                yield self.table(pairs)

    def table(self, pairs: MatchedPairs) -> pa.Table:
        """The table of some pairs."""
        self.counts.update(pairs.counts)
        pairs, score, known = self.scorer.score(pairs)
        probability = probabilities(score)
        scores = self.scorer.column(score, known)
        self.counts["scored"] += len(scores) - scores.null_count
        columns = [pairs.raw_user, pairs.raw_item, scores, self.scorer.column(probability, known), pa.array(known)]
        return pa.table(columns, schema=self.schema)


def probabilities(score: np.ndarray) -> np.ndarray:
    """Probabilities (float32) of logits."""
    return (1 / (1 + np.exp(-score.astype(np.float64)))).astype(np.float32)


def logits(
    model: FrozenModel | RemoteModel, user: np.ndarray, item: np.ndarray, call: PairLogits = FrozenModel.__call__
) -> np.ndarray:
    """Logits (float32) of pairs of indices (int64), a bounded number at a time; `call` applies the model to them.

    They are equal to the bit whatever is scored with a pair, by how many threads, and wherever its rows come from.
    """
    scores = np.empty(len(user), np.float32)
    if isinstance(model, RemoteModel):
        for first in range(0, len(user), model.most_pairs):
            some = slice(first, first + model.most_pairs)
            scores[some] = logits(*model.of(user[some], item[some]), call)
        return scores

    def score(start: int) -> None:
        part = slice(start, start + _SCORED_ROWS)
        pairs = torch.from_numpy(user[part]), torch.from_numpy(item[part])
        scores[part] = score_in_tiles(partial(call, model), *pairs).float().numpy()

    starts = range(0, len(user), _SCORED_ROWS)
    with one_thread() as threads:
        if len(starts) < 2 or threads == 1:
            for start in starts:
                score(start)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(score, starts))
    return scores
