"""The model that a replica serves: one checkpoint, in arrays that all replicas of a node share.

`pack` makes plain arrays of a run; Ray's object store holds them once per node. `ServedModel` reads them in place.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils import _pytree as pytree

from invdist.models.frozen import FrozenModel
from invdist.runtime.errors import UserError
from invdist.serving.annotation import soft_labels
from invdist.serving.id_lookup import SortedIds
from invdist.serving.inputs import MatchedPairs, match
from invdist.serving.recommendation import SEEN, AskedUsers, recommendation_tables
from invdist.serving.run import TrainedRun
from invdist.serving.scoring import Scorer, Unknown, logits, probabilities
from invdist.serving.seen import SeenPairs
from invdist.serving.topk import TopK, prepared_items


def pack(run: TrainedRun) -> dict[str, Any]:
    """A run as arrays and small objects, for the object store."""
    model = run.model
    return {
        "checkpoint": {"run": run.folder.name, **run.about_checkpoint()},
        "rows": (model.user.numpy(), model.item.numpy()),
        "backbone": model.backbone,
        "items_prepared": pytree.tree_map(lambda tensor: tensor.numpy(), prepared_items(model.backbone, model.item)),
        "ids": (SortedIds(run.users.raw), SortedIds(run.items.raw)),
        "prior": run.prior,
        "seen": SeenPairs.read(run.dataset, SEEN),
    }


class ServedModel:
    """A packed run, ready to answer."""

    def __init__(self, packed: dict[str, Any]) -> None:
        self.checkpoint: dict[str, Any] = packed["checkpoint"]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nothing here writes
            user, item = (torch.from_numpy(rows) for rows in packed["rows"])
            self._items_prepared = pytree.tree_map(torch.from_numpy, packed["items_prepared"])
        self.model = FrozenModel(user, item, packed["backbone"])
        self.users, self.items = packed["ids"]
        self._prior, self._seen = packed["prior"], packed["seen"]

    def match(self, user: pa.Array, item: pa.Array) -> MatchedPairs:
        """Pairs of raw ids with their indices."""
        return match(user, item, self.users, self.items)

    def logits(self, user: np.ndarray, item: np.ndarray) -> np.ndarray:
        """Logits (float32) of pairs of indices."""
        return logits(self.model, user, item)

    def scores(self, pairs: MatchedPairs, known_scores: np.ndarray, unknown: Unknown) -> dict[str, list[Any]]:
        """The columns of `invdist score`, from the logits of the known pairs."""
        scorer, pairs, score, known = self._filled(pairs, known_scores, unknown)
        return _columns(scorer, pairs, known, score=score, probability=probabilities(score))

    def annotations(
        self, pairs: MatchedPairs, known_scores: np.ndarray, unknown: Unknown, threshold: float
    ) -> dict[str, list[Any]]:
        """The columns of `invdist annotate`, from the logits of the known pairs."""
        scorer, pairs, score, known = self._filled(pairs, known_scores, unknown)
        w1, w0 = soft_labels(score)
        label = (w1 >= np.float32(threshold)).astype(np.int8)
        values = {"score": score, "w1": w1, "w0": w0, "label": label, "confidence": np.abs(w1 - w0)}
        return _columns(scorer, pairs, known, **values)

    def recommendations(self, users: pa.Array, k: int, unknown: Any, *, leave_out_seen: bool) -> dict[str, list[Any]]:
        """The columns of `invdist recommend`."""
        if k > len(self.items):
            raise UserError(f"k: {k} is more than the {len(self.items)} items of the catalogue")
        top = TopK(self.model, k, self._seen if leave_out_seen else None, self._items_prepared)
        schema, tables = recommendation_tables(top, AskedUsers(users, self.users), self.users, self.items, unknown)
        return pa.concat_tables([schema.empty_table(), *tables]).to_pydict()

    def _filled(
        self, pairs: MatchedPairs, known_scores: np.ndarray, unknown: Unknown
    ) -> tuple[Scorer, MatchedPairs, np.ndarray, np.ndarray]:
        scorer = Scorer(self.model, self.users, self.items, self._prior, unknown)
        return scorer, *scorer.filled(pairs, known_scores)


def _columns(scorer: Scorer, pairs: MatchedPairs, known: np.ndarray, **values: np.ndarray) -> dict[str, list[Any]]:
    return {
        "user": pairs.raw_user.to_pylist(),
        "item": pairs.raw_item.to_pylist(),
        **{name: scorer.column(value, known).to_pylist() for name, value in values.items()},
        "known": known.tolist(),
    }
