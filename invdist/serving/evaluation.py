"""Metrics of a trained run: of the rows of a split, or of its recommendations over the whole catalogue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from invdist.evaluation.catalogue import CatalogueMetrics
from invdist.evaluation.metrics import ranking_metrics
from invdist.models.frozen import FrozenModel
from invdist.runtime.errors import UserError
from invdist.serving.recommendation import SEEN
from invdist.serving.run import TrainedRun
from invdist.serving.scoring import PairLogits, logits
from invdist.serving.seen import SeenPairs, in_splits
from invdist.serving.topk import Best, TopK, check_k

Logits = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Logits of pairs of indices."""
Ranked = Callable[[np.ndarray, int, Sequence[str]], Iterator[Best]]
"""The best items of users: (users, k, splits with items to leave out)."""


def split_metrics(run: TrainedRun, split: str, score: Logits | None = None) -> dict[str, float | int]:
    """The metrics that training reports, of the rows of a split: AUC, GAUC, NDCG, MRR, log-loss, calibration error.

    Computed in the precision of training, so that they are the same figures. `score` gives the logits, by default with
    the run's model in this process.
    """
    user, item, label = _rows(run, split)
    scores = score(user, item) if score else logits(run.model, user, item, in_precision_of_training(run))
    return ranking_metrics(user, label, scores, run.config.training.ndcg_k)


def catalogue_metrics(
    run: TrainedRun,
    split: str,
    ks: Sequence[int],
    progress: Callable[[int, int], None] = lambda *_: None,
    ranked: Ranked | None = None,
) -> dict[str, Any]:
    """Recall, hit rate, NDCG, MRR and coverage at each `k` of recommending from the whole catalogue, exactly.

    The relevant items of a user are the positives of the split. Every item is ranked but those that the user has in
    training (`SEEN`), relevant ones included: they cannot be recommended again. Users without a relevant item are left
    out. Users are ranked in batches; `progress` is called with (users done, users in all). `ranked` gives the best
    items, by default with the run's model in this process.
    """
    if not ks or min(ks) < 1:
        raise UserError(f"--k {' '.join(map(str, ks))}: expected at least 1")
    dataset, seen_splits = run.dataset, [other for other in SEEN if other != split]
    user, item, label = _rows(run, split)
    positive = label == 1
    wanted = positive.copy()
    wanted[positive] = ~in_splits(dataset, seen_splits, user[positive], item[positive])
    if not wanted.any():
        raise UserError(f"{dataset.path}: no positive row of the split {split!r} is new to its user: nothing to find")
    relevant = SeenPairs(user[wanted], item[wanted], dataset.items)
    users = np.unique(user[wanted])
    count = np.bincount(relevant.of(users)[0])
    check_k(max(ks), dataset.items)
    totals = CatalogueMetrics(ks, dataset.items)
    here = ranked or (lambda users, k, seen: TopK(run.model, k, SeenPairs.read(dataset, seen)).of(users))
    for best in here(users, max(ks), seen_splits):
        first = np.flatnonzero(np.append(True, best.user[1:] != best.user[:-1]))
        own = count[np.searchsorted(users, best.user[first])]
        totals.add(first, best.rank, best.item, relevant.contains(best.user, best.item), own)
        progress(totals.users, len(users))
    return {
        **totals.metrics(),
        "users": totals.users,
        "users_left_out": len(np.unique(user)) - totals.users,
        "relevant": int(count.sum()),
        "items": dataset.items,
        "seen_left_out": seen_splits,
    }


def in_precision_of_training(run: TrainedRun) -> PairLogits:
    """How the model of a run is applied: in the precision of training."""
    return _in_bf16 if run.config.training.precision == "bf16" else FrozenModel.__call__


def _in_bf16(model: FrozenModel, user: Tensor, item: Tensor) -> Tensor:
    """Logits with the rounding of training in bf16: each side of a separable backbone is rounded by itself."""
    backbone = model.backbone
    with torch.autocast("cpu", torch.bfloat16):
        if not backbone.separable:
            return model(user, item)
        return backbone.combine(backbone.user_part(model.user[user]), backbone.item_part(model.item[item]))


def _rows(run: TrainedRun, split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(user, item, label) of a split, int64."""
    if not run.dataset.rows.get(split):
        raise UserError(f"{run.dataset.path}: the data set has no rows in its split {split!r}")
    table = run.dataset.read(split, ["user", "item", "label"])
    user, item, label = (table[name].to_numpy().astype(np.int64) for name in ("user", "item", "label"))
    return user, item, label
