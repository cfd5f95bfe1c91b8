"""Scores of pairs by a frozen model, with one rule for pairs that it does not know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import starmap
from typing import Literal, get_args

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from invdist.models.frozen import FrozenModel
from invdist.runtime.errors import UserError
from invdist.runtime.process import thread_per_piece
from invdist.serving.inputs import COUNTS, MatchedPairs, PairSource
from invdist.serving.raw_ids import RawIds
from invdist.serving.run import TrainedRun
from invdist.serving.sharded.remote import RemoteModel, scored_rows

Unknown = Literal["null", "prior", "drop"]
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
        if self.unknown == "drop" and not known.all():
            pairs, known = pairs.where(known), known[known]
        scores = np.full(len(known), self.prior, np.float32)
        scores[known] = logits(self.model, pairs.user[known], pairs.item[known])
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
        probability = (1 / (1 + np.exp(-score.astype(np.float64)))).astype(np.float32)
        scores = self.scorer.column(score, known)
        self.counts["scored"] += len(scores) - scores.null_count
        columns = [pairs.raw_user, pairs.raw_item, scores, self.scorer.column(probability, known), pa.array(known)]
        return pa.table(columns, schema=self.schema)


def logits(
    model: FrozenModel | RemoteModel, user: np.ndarray, item: np.ndarray, call: PairLogits = FrozenModel.__call__
) -> np.ndarray:
    """Logits (float32) of pairs of indices (int64), a bounded number at a time; `call` applies the model to them.

    The pieces are the same wherever they are computed, one thread each, so the result is the same to the bit.
    """
    scores = np.empty(len(user), np.float32)

    @torch.inference_mode()
    def score(model: FrozenModel, user: np.ndarray, item: np.ndarray, out: np.ndarray) -> None:
        out[:] = call(model, torch.from_numpy(user), torch.from_numpy(item)).float().numpy()

    rows = scored_rows(model.columns)
    with thread_per_piece() as (pool, threads):
        fetched = model.most_pairs if isinstance(model, RemoteModel) else max(1, len(user))
        for start in range(0, len(user), fetched):
            some = slice(start, start + fetched)
            here, *pairs = model.of(user[some], item[some]) if isinstance(model, RemoteModel) else (model, user, item)
            pieces = (
                (here, *(side[first : first + rows] for side in (*pairs, scores[some])))
                for first in range(0, len(pairs[0]), rows)
            )
            # A process with one thread does not hand its work to another.
            list(pool.map(score, *zip(*pieces, strict=True)) if threads > 1 else starmap(score, pieces))
    return scores
