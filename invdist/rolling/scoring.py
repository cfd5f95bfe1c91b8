"""The score of a day by a model that has not seen it: all its labeled rows, and those of new users or items apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from invdist.data.dataset import Dataset
from invdist.data.schema import LABELED_SPLITS
from invdist.evaluation.metrics import ranking_metrics
from invdist.models.exposure_head import ExposureHead
from invdist.models.frozen import FrozenModel
from invdist.serving.raw_ids import UNKNOWN, RawIds
from invdist.serving.run import TrainedRun
from invdist.serving.scoring import logits

METRICS = ("auc", "gauc", "ndcg")


class DayRows:
    """The labeled rows that a day brought to its data set: `user`, `item` (indices of the data set) and `label`."""

    def __init__(self, dataset: Dataset, before: Dataset) -> None:
        self.dataset = dataset
        splits = [split for split in LABELED_SPLITS if dataset.rows[split]]
        tables = [dataset.read(split, ["user", "item", "label", "day"]) for split in splits]
        columns = {
            name: np.concatenate([table[name].to_numpy() for table in tables]) for name in tables[0].column_names
        }
        today = columns["day"] == dataset.manifest["day"]
        self.user, self.item, self.label = (columns[name][today].astype(np.int64) for name in ("user", "item", "label"))
        self.users, self.items = dataset.raw_ids("users"), dataset.raw_ids("items")
        self.cold_user = RawIds(before.raw_ids("users")).indices(self.users)[self.user] == UNKNOWN
        self.cold_item = RawIds(before.raw_ids("items")).indices(self.items)[self.item] == UNKNOWN

    def score(self, run: TrainedRun) -> dict[str, Any]:
        """Metrics of a run on the day: of all rows, and of those whose user or item came today (None: one class).

        An id that the run does not know is scored by the mean row of its kind.
        """
        model = with_prior(run.model)
        user = _last_if_unknown(run.users.indices(run.users.cast(self.users))[self.user], len(run.users))
        item = _last_if_unknown(run.items.indices(run.items.cast(self.items))[self.item], len(run.items))
        return self.metrics(logits(model, user, item), run.config.training.ndcg_k)

    def metrics(self, score: np.ndarray, k: int) -> dict[str, Any]:
        """Metrics of given scores."""
        parts = {"all": np.ones(len(score), bool), "cold_users": self.cold_user, "cold_items": self.cold_item}
        found: dict[str, Any] = {}
        for name, rows in parts.items():
            label = self.label[rows]
            if len(set(label.tolist())) < 2:
                found[name] = {"rows": len(label)}
                continue
            metrics = ranking_metrics(self.user[rows], label, score[rows], k)
            found[name] = {key: _plain(metrics[key]) for key in (*METRICS, "logloss", "rows", "users")}
        return found

    def best_possible(self, k: int) -> dict[str, Any] | None:
        """Metrics of the true preferences, where they are known."""
        if "latent_users" not in self.dataset.manifest["files"]:
            return None
        truth = self.dataset.true_preference(self.user, self.item).astype(np.float64).clip(1e-6, 1 - 1e-6)
        return self.metrics(np.log(truth / (1 - truth)), k)


def with_prior(model: FrozenModel) -> FrozenModel:
    """A model with one more user and item, the last: as a new id starts when a model grows, without exposures."""
    backbone = model.backbone
    own = backbone.inner.columns if isinstance(backbone, ExposureHead) else model.user.shape[1]

    def extended(rows: Tensor) -> Tensor:
        prior = torch.zeros_like(rows[:1])
        prior[0, :own] = rows[:, :own].double().mean(0).to(rows.dtype)
        return torch.cat([rows, prior])

    return FrozenModel(extended(model.user), extended(model.item), backbone)


def _last_if_unknown(index: np.ndarray, count: int) -> np.ndarray:
    return np.where(index == UNKNOWN, count, index)


def _plain(value: float) -> float | None:
    return None if np.isnan(value) else round(float(value), 6)
