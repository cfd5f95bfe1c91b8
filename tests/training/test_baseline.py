"""The means beside every model: the figures of the strategy `means`, at any number of ranks, and a useful warning."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from invdist import config as configs
from invdist.data.dataset import Dataset
from invdist.data.prepare.labeling import Labeling
from invdist.data.prepare.options import Options
from invdist.data.prepare.pipeline import prepare
from invdist.data.prepare.synthetic import Scale, SyntheticLog
from invdist.embeddings.comm import Comm
from invdist.evaluation.metrics import ranking_metrics
from invdist.training.baseline import MeansBaseline, below_means
from invdist.training.trainer import Trainer
from tests.distributed import run_ranks

_SETTINGS = {"data": {"batch_size": 256, "readers": 0}, "rows": {"dim": 8}, "training": {"epochs": 1}}


def _textbook(data: Path, split: str, most_labels: int | None = None) -> float:
    """AUC of the means, written as in a textbook; if asked, of users with at most so many labels."""
    dataset = Dataset.open(str(data))
    labeled = [dataset.read(name).to_pandas() for name in ("train", "training_test")]
    rows = [row for frame in labeled for row in zip(frame.user, frame.item, frame.label, strict=True)]
    overall = (sum(label for *_, label in rows) + 1) / (len(rows) + 2)

    def log_odds(column: int, index: int) -> np.float32:
        labels = [row[2] for row in rows if row[column] == index]
        p = (sum(labels) + 10 * overall) / (len(labels) + 10)
        # Users with few labels have many ties, which rounding must not break.
        return np.float32(np.log(p / (1 - p)))

    held_out = dataset.read(split).to_pandas()
    if most_labels is not None:
        labels = Counter(user for user, *_ in rows)
        held_out = held_out[[labels[user] <= most_labels for user in held_out.user]]
    users = {u: log_odds(0, u) for u in set(held_out.user)}
    items = {i: log_odds(1, i) for i in set(held_out.item)}
    constant = np.float32(np.log(overall / (1 - overall)))
    scores = [users[u] + items[i] - constant for u, i in zip(held_out.user, held_out.item, strict=True)]
    return ranking_metrics(held_out.user.to_numpy(), held_out.label.to_numpy(), np.array(scores, np.float32))["auc"]


def _final(rank: int, world_size: int, data: str, run: str, method: str) -> dict[str, Any]:
    config = configs.from_mapping(_SETTINGS, [f"data.path={data}", f"method={method}"])
    return Trainer(config, Path(run), device=torch.device("cpu")).fit()


def test_every_run_ends_with_the_means_beside_the_model(tiny_data: Path, tmp_path: Path) -> None:
    learned = run_ranks(_final, 2, str(tiny_data), str(tmp_path / "none"), "none")
    assert learned[0]["means"] == learned[1]["means"]
    for split in ("valid", "test"):
        assert learned[0]["means"][split]["auc"] == pytest.approx(_textbook(tiny_data, split), abs=1e-4)
    (alone,) = run_ranks(_final, 1, str(tiny_data), str(tmp_path / "means"), "means")
    for split in ("valid", "test"):
        assert alone["means"][split]["auc"] == pytest.approx(alone[split]["auc"], abs=1e-6)
        assert alone["means"][split]["auc"] == pytest.approx(learned[0]["means"][split]["auc"], abs=1e-9)
    events = [json.loads(line) for line in (tmp_path / "none" / "metrics.jsonl").read_text().splitlines()]
    # One epoch with gamma 1e-3 on 3,600 interactions learns next to nothing.
    of_ranks, warning = [event["message"] for event in events if event["event"] == "warning"]
    assert "2 workers on one machine" in of_ranks
    assert "of user and item means" in warning
    assert "larger optimizer.gamma (0.01, now 0.001)" in warning


def test_users_with_few_labels_have_an_auc_of_their_own(tiny_data: Path, tmp_path: Path) -> None:
    sparse, few = tmp_path / "sparse", Options(label_fraction=0.1)
    prepare(
        SyntheticLog("tiny", Scale(users=200, items=300, labeled_rows=6000), 0),
        Labeling(rules=("finish_rate",)),
        few,
        sparse,
    )
    for ranks in (1, 2):
        final = run_ranks(_final, ranks, str(sparse), str(tmp_path / str(ranks)), "means")[0]
        for split in ("valid", "test"):
            expected = _textbook(sparse, split, most_labels=2)
            assert abs(expected - final[split]["auc"]) > 0.005
            assert final[split]["auc_few"] == pytest.approx(expected, abs=1e-4)
            assert final["means"][split]["auc_few"] == pytest.approx(expected, abs=1e-4)
    # All users of the usual data set have more labels than that.
    final = run_ranks(_final, 1, str(tiny_data), str(tmp_path / "none"), "means")[0]
    assert "auc_few" not in final["test"]


def _scores(rank: int, world_size: int, data: str) -> np.ndarray:
    baseline = MeansBaseline(Dataset.open(data), Comm(), torch.device("cpu"))
    return baseline.score(np.arange(50), np.arange(50))


def test_the_means_do_not_depend_on_the_number_of_ranks(tiny_data: Path) -> None:
    (one,), ranks = run_ranks(_scores, 1, str(tiny_data)), run_ranks(_scores, 3, str(tiny_data))
    assert all(np.array_equal(one, other) for other in ranks)


def test_a_model_below_the_means_is_told_what_to_try() -> None:
    config = configs.from_mapping(_SETTINGS, ["data.path=x", "optimizer.gamma=1e-5"])
    means = {"auc": 0.7, "logloss": 0.6}
    assert below_means(config, {"auc": 0.8}, means, 0.69, 3) is None
    assert below_means(config, {"auc": 0.7}, means, 0.69, 3) is None
    for loss in (0.69, float("nan"), None):
        short = below_means(config, {"auc": 0.6}, means, loss, 3)
        assert short is not None
        assert "too little: try a larger optimizer.gamma (0.0001, now 1e-05)" in short
        assert "training.epochs (6, now 3)" in short
    config.growth.run = "runs/monday"
    assert "growth.epochs (6, now 3)" in (below_means(config, {"auc": 0.6}, means, 0.69, 3) or "")
    config.growth.run = None
    fitted = below_means(config, {"auc": 0.6}, means, 0.2, 4)
    assert fitted is not None
    assert "overfits: try rows.bias=true" in fitted
    config = configs.from_mapping(_SETTINGS, ["data.path=x", "rows.bias=true"])
    biased = below_means(config, {"auc": 0.6}, means, 0.2, 4)
    assert biased is not None
    assert "overfits: try a smaller optimizer.gamma" in biased, "it has them already"
    assert "rows.dim (4, now 8)" in fitted
