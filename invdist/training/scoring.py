"""Scores interactions on all ranks: a split for its metrics, a fixed probe for its annotations."""

from __future__ import annotations

import math

import numpy as np
import torch

from invdist.data.dataset import Dataset
from invdist.embeddings.exchange import Pairs
from invdist.evaluation.distributed import distributed_metrics, rows_by_user
from invdist.evaluation.metrics import ScoredRows, auc
from invdist.learning.losses import annotate
from invdist.learning.strategy import Strategy
from invdist.runtime.errors import UserError

PROBE_ROWS = 20_000
_BINS = 20


def score_pairs(strategy: Strategy, user: np.ndarray, item: np.ndarray, batch_rows: int) -> np.ndarray:
    """Logits of this rank's pairs. Every rank calls it, each with its own number of pairs."""
    comm, device = strategy.model.comm, strategy.model.device
    counts = torch.zeros(comm.size, device=device, dtype=torch.float64)
    counts[comm.rank] = -(-len(user) // batch_rows)
    rounds = int(comm.all_reduce(counts).wait().max())
    scores = []
    for start in range(0, rounds * batch_rows, batch_rows):
        part = slice(start, start + batch_rows)
        pairs = Pairs(*(torch.from_numpy(a[part].astype(np.int64)).to(device) for a in (user, item)))
        scores.append(strategy.score(pairs).cpu().numpy())
    return np.concatenate(scores) if scores else np.empty(0, np.float32)


class SplitScorer:
    """Metrics of a split. Each rank reads its share of the row groups, and gets those interactions of its own users
    (`user % ranks`), in `user` and `item`, from the ranks that read them. Every rank makes one at the same time.
    """

    def __init__(self, dataset: Dataset, split: str, strategy: Strategy, batch_rows: int, k: int) -> None:
        self._strategy, self._batch_rows, self._k = strategy, batch_rows, k
        comm = strategy.model.comm
        groups = dataset.row_groups([split])[comm.rank :: comm.size]
        columns = dataset.read_groups(groups, ["user", "item", "label"])
        self.user, self.item, self._label = rows_by_user(columns, comm.group) if comm.size > 1 else columns

    def metrics(self) -> dict[str, float]:
        """The metrics of the model as it is now, the same on every rank."""
        return self.metrics_of(self.scores())

    def scores(self) -> np.ndarray:
        """Logits of `user`, `item` by the model as it is now."""
        return score_pairs(self._strategy, self.user, self.item, self._batch_rows)

    def undefined(self) -> set[str]:
        """Metrics that have no value on this split for any scores; `UserError` if it has only one class."""
        return {name for name, value in self.metrics_of(np.zeros(len(self.user))).items() if math.isnan(value)}

    def check(self, metric: str, path: str) -> None:
        """`UserError` if the metric that chooses the best epoch is not defined on the validation rows of `path`."""
        if metric in self.undefined():
            raise UserError(
                f"training.metric: {metric} is not defined on the validation rows of {path}, where no user has both "
                "classes; use training.metric=auc"
            )

    def metrics_of(self, scores: np.ndarray) -> dict[str, float]:
        """The metrics of given scores of `user`, `item`, the same on every rank."""
        return distributed_metrics(self.user, self._label, scores, k=self._k, group=self._strategy.model.comm.group)

    def auc_of(self, scores: np.ndarray, chosen: np.ndarray) -> float | None:
        """The AUC of given scores over the interactions that a mask chooses; None if these have only one class."""
        comm, label = self._strategy.model.comm, self._label[chosen]
        classes = torch.from_numpy(np.bincount(label.astype(np.int64), minlength=2)).double()
        if not comm.all_reduce(classes.to(comm.device)).wait().all():
            return None
        return distributed_metrics(self.user[chosen], label, scores[chosen], k=self._k, group=comm.group)["auc"]


class Probe:
    """A fixed sample of unclear exposures, annotated after every epoch to see annotations change."""

    def __init__(self, dataset: Dataset, strategy: Strategy, batch_rows: int) -> None:
        self._strategy, self._batch_rows = strategy, batch_rows
        self._user = _head(dataset, "unclear", "user")
        self._item = _head(dataset, "unclear", "item")
        truth = _head(dataset, "truth", "truth").astype(np.float64)
        self._truth = truth if len(truth) and not np.isnan(truth).all() else None

    def annotations(self) -> dict[str, object] | None:
        """Histograms of `w1` and `w0`; where the truth is known, the AUC and reliability of `w1`."""
        if not len(self._user):
            return None
        w1 = self._annotate()
        edges = np.linspace(0, 1, _BINS + 1)
        result: dict[str, object] = {
            "rows": len(w1),
            "edges": edges.tolist(),
            "w1": np.histogram(w1, edges)[0].tolist(),
            "w0": np.histogram(1 - w1, edges)[0].tolist(),
            "auc": None,
            "reliability": None,
        }
        if self._truth is not None:
            known = ~np.isnan(self._truth)
            truth, w1 = self._truth[known], w1[known]
            positive = truth >= 0.5
            if 0 < positive.sum() < len(positive):
                result["auc"] = auc(ScoredRows.checked(np.zeros(len(w1), int), positive.astype(int), w1, k=1))
            bins = np.minimum((w1 * _BINS).astype(int), _BINS - 1)
            counts = np.bincount(bins, minlength=_BINS)
            filled = counts > 0
            means = [np.bincount(bins, x, _BINS)[filled] / counts[filled] for x in (w1, truth)]
            result["reliability"] = np.stack([*means, counts[filled]], 1).tolist()
        return result

    def _annotate(self) -> np.ndarray:
        """`w1` of the whole probe on every rank; each scores its share."""
        comm = self._strategy.model.comm
        mine = slice(comm.rank, None, comm.size)
        scores = score_pairs(self._strategy, self._user[mine], self._item[mine], self._batch_rows)
        w1 = torch.zeros(len(self._user), dtype=torch.float64)
        w1[mine] = annotate(torch.from_numpy(scores)).w1.double()
        return comm.all_reduce(w1.to(self._strategy.model.device)).wait().cpu().numpy()


def _head(dataset: Dataset, split: str, column: str) -> np.ndarray:
    """The first values of a column. Shards are in random order, so this is a random sample."""
    parts, rows = [], 0
    for batch in dataset.scan(split, [column]) if dataset.shards(split) else ():
        parts.append(batch.column(column).to_numpy(zero_copy_only=False))
        rows += len(batch)
        if rows >= PROBE_ROWS:
            break
    return np.concatenate(parts)[:PROBE_ROWS] if parts else np.empty(0, np.int32)
