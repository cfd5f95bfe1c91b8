"""A split scored by several ranks: each reads its share, and the metrics are the same bits at any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from invdist.data.dataset import Dataset
from invdist.evaluation.metrics import ranking_metrics
from invdist.training.baseline import MeansBaseline
from invdist.training.scoring import SplitScorer
from tests.distributed import run_ranks
from tests.training.checkpointing import build, this_process


def _score(user: np.ndarray, item: np.ndarray) -> np.ndarray:
    """Scores that depend on the pair alone, with ties."""
    return np.sin(user.astype(np.float64) * 12.9898 + item * 78.233).round(2)


def _metrics(rank: int, size: int, data: str) -> dict[str, Any]:
    dataset, read = Dataset.open(data), []
    strategy = build(users=dataset.users, items=dataset.items)
    groups = Dataset.read_groups

    def counted(self: Dataset, wanted: Any, columns: Any) -> Any:
        read.extend(wanted)
        return groups(self, wanted, columns)

    found: dict[str, Any] = {}
    for split in ("valid", "test"):
        with mock.patch.object(Dataset, "read_groups", counted):
            scorer = SplitScorer(dataset, split, strategy, 512, 10)
        assert (scorer.user % size == rank).all()
        found[split] = scorer.metrics_of(_score(scorer.user, scorer.item))
        found[f"means {split}"] = MeansBaseline(dataset, strategy.model.comm, torch.device("cpu")).metrics(scorer)
        found[f"model {split}"] = scorer.metrics()
    return {"metrics": found, "read": read}


def test_the_same_metrics_at_one_two_and_three_ranks(tiny_data: Path) -> None:
    with this_process():
        alone = _metrics(0, 1, str(tiny_data))
    dataset = Dataset.open(str(tiny_data))
    for size in (2, 3):
        ranks = run_ranks(_metrics, size, str(tiny_data))
        for rank in ranks:
            for name, expected in alone["metrics"].items():
                # The last bit of a logit may depend on how many pairs a kernel gets at once.
                exact = not name.startswith("model")
                assert rank["metrics"][name] == (expected if exact else pytest.approx(expected, rel=1e-6)), name
        read = [group for rank in ranks for group in rank["read"]]  # each row group by one rank
        assert sorted(read) == sorted(dataset.row_groups(["valid", "test"]))
    for split in ("valid", "test"):
        table = dataset.read(split)
        user, item, label = (table[name].to_numpy() for name in ("user", "item", "label"))
        assert alone["metrics"][split] == ranking_metrics(user, label, _score(user, item), k=10)
