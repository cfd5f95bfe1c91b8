"""Metrics of a trained run: of the rows of a split, or of its recommendations over the whole catalogue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from invdist.data.stream.observed import ObservedPairs
from invdist.evaluation.catalogue import CatalogueMetrics
from invdist.evaluation.metrics import ranking_metrics
from invdist.models.frozen import FrozenModel
from invdist.runtime.errors import UserError
from invdist.serving.recommendation import SEEN
from invdist.serving.run import TrainedRun
from invdist.serving.scoring import logits
from invdist.serving.topk import TopK


def split_metrics(run: TrainedRun, split: str) -> dict[str, float | int]:
    """The metrics that training reports, of the rows of a split: AUC, GAUC, NDCG, MRR, log-loss, calibration error.

    Computed in the precision of training, so that they are the same figures.
    """
    user, item, label = _rows(run, split)
    bf16 = run.config.training.precision == "bf16"
    scores = logits(_in_bf16(run.model) if bf16 else run.model, user, item)
    return ranking_metrics(user, label, scores, run.config.training.ndcg_k)


def catalogue_metrics(
    run: TrainedRun, split: str, ks: Sequence[int], progress: Callable[[int, int], None] = lambda *_: None
) -> dict[str, Any]:
    """Recall, hit rate, NDCG, MRR and coverage at each `k` of recommending from the whole catalogue, exactly.

    The relevant items of a user are the positives of the split. Every item is ranked but those that the user has in
    training (`SEEN`), relevant ones included: they cannot be recommended again. Users without a relevant item are left
    out. Users are ranked in batches; `progress` is called with (users done, users in all).
    """
    if not ks or min(ks) < 1:
        raise UserError(f"--k {' '.join(map(str, ks))}: expected at least 1")
    dataset, seen_splits = run.dataset, [other for other in SEEN if other != split]
    user, item, label = _rows(run, split)
    seen = ObservedPairs.of(dataset, seen_splits)
    wanted = (label == 1) & ~seen.contains(user, item)
    if not wanted.any():
        raise UserError(f"{dataset.path}: no positive row of the split {split!r} is new to its user: nothing to find")
    relevant = ObservedPairs(user[wanted], item[wanted], dataset.users, dataset.items)
    count = np.diff(relevant.offsets)
    users = np.flatnonzero(count)
    totals = CatalogueMetrics(ks, dataset.items)
    for best in TopK(run.model, max(ks), seen).of(users):
        first = np.flatnonzero(np.append(True, best.user[1:] != best.user[:-1]))
        totals.add(first, best.rank, best.item, relevant.contains(best.user, best.item), count[best.user[first]])
        progress(totals.users, len(users))
    return {
        **totals.metrics(),
        "users": totals.users,
        "users_left_out": len(np.unique(user)) - totals.users,
        "relevant": int(count.sum()),
        "items": dataset.items,
        "seen_left_out": seen_splits,
    }


def _in_bf16(model: FrozenModel) -> Callable[[Tensor, Tensor], Tensor]:
    """The model with the rounding of training in bf16: each side of a separable backbone is rounded by itself."""
    backbone = model.backbone

    def score(user: Tensor, item: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            if not backbone.separable:
                return model(user, item)
            return backbone.combine(backbone.user_part(model.user[user]), backbone.item_part(model.item[item]))

    return score


def _rows(run: TrainedRun, split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(user, item, label) of a split, int64."""
    if not run.dataset.rows.get(split):
        raise UserError(f"{run.dataset.path}: the data set has no rows in its split {split!r}")
    table = run.dataset.read(split, ["user", "item", "label"])
    user, item, label = (table[name].to_numpy().astype(np.int64) for name in ("user", "item", "label"))
    return user, item, label
