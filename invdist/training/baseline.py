"""The means baseline that is shown beside every trained model: log-odds of smoothed user and item means.

It costs one scan of the training labels. A model that ends below it has learned less than two averages know.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from invdist.config import Config
from invdist.data.dataset import Dataset
from invdist.data.schema import TRAINING_LABELED
from invdist.embeddings.comm import Comm
from invdist.learning.log_odds import overall_mean, smoothed_log_odds
from invdist.training.scoring import SplitScorer
from invdist.training.sizes import gamma as gamma_of

FEW_LABELS = 2
"""`auc_few` is the AUC of users with at most this many training labels."""


class MeansBaseline:
    """Counts of every user and item over the labeled training interactions, the same on every rank.

    Every rank makes one at the same time; each reads its share of the shards. It holds 8 bytes per user and item.
    """

    def __init__(self, dataset: Dataset, comm: Comm, device: torch.device) -> None:
        self._users = dataset.users
        counts = np.zeros((dataset.users + dataset.items, 2), dtype=np.int32)
        shards = [shard["file"] for split in TRAINING_LABELED for shard in dataset.shards(split)]
        for file in shards[comm.rank :: comm.size]:
            with dataset.parquet(file) as shard:
                for batch in shard.iter_batches(1 << 18, columns=["user", "item", "label"]):
                    user, item, label = (column.to_numpy(zero_copy_only=False) for column in batch.columns)
                    for index in (user, item.astype(np.int64) + dataset.users):
                        np.add.at(counts[:, 0], index, 1)
                        np.add.at(counts[:, 1], index[label > 0], 1)
        self._counts = comm.all_reduce(torch.from_numpy(counts).to(device)).wait().cpu()
        totals = self._counts[: dataset.users].sum(0, dtype=torch.float64)
        self._overall = overall_mean(*totals)

    def score(self, user: np.ndarray, item: np.ndarray) -> np.ndarray:
        """Logits of pairs, float32 `[n]`: `logit(p_u) + logit(p_i) - logit(p)`."""
        index = [torch.from_numpy(user.astype(np.int64)), torch.from_numpy(item.astype(np.int64)) + self._users]
        parts = [smoothed_log_odds(self._counts[i].double(), self._overall) for i in index]
        return (parts[0] + parts[1] - torch.logit(self._overall).float()).numpy()

    def metrics(self, scorer: SplitScorer) -> dict[str, float]:
        """The metrics of the baseline on the interactions of a scorer."""
        return self.with_few(scorer, self.score(scorer.user, scorer.item))

    def with_few(self, scorer: SplitScorer, scores: np.ndarray) -> dict[str, float]:
        """The metrics of scores with `auc_few`, the AUC of users with at most `FEW_LABELS` training labels.

        It is left out where those users have only one class.
        """
        few = (self._counts[:, 0] <= FEW_LABELS).numpy()[scorer.user]
        auc = scorer.auc_of(scores, few)
        return scorer.metrics_of(scores) | ({} if auc is None else {"auc_few": auc})


def below_means(
    config: Config, model: Mapping[str, float], means: Mapping[str, float], loss: float | None, epochs: int
) -> str | None:
    """A warning with what to try if the model's validation metric is below that of the means, else None.

    `loss` is the training loss of the last of the `epochs` epochs of this run. Above the log-loss of the means, the
    model has not learned enough yet; below, it has overfitted its training interactions.
    """
    name, gamma = config.training.metric, gamma_of(config)
    if not model[name] < means[name]:
        return None
    said = f"valid {name} {model[name]:.4f} is below the {means[name]:.4f} of user and item means, which learn nothing"
    if loss is None or not loss < means["logloss"]:
        return (
            f"{said}. The model has learned too little: try a larger optimizer.gamma ({gamma * 10:g}, now {gamma:g}) "
            f"or more {'growth' if config.growth.run else 'training'}.epochs ({2 * epochs}, now {epochs})"
        )
    bias = "" if config.rows.bias else "rows.bias=true, "
    return (
        f"{said}. The model overfits: try {bias}a smaller optimizer.gamma ({gamma / 3:.1g}, now {gamma:g}) "
        f"or a smaller rows.dim ({max(4, config.rows.dim // 8 * 4)}, now {config.rows.dim})"
    )
