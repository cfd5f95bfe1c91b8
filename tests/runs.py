"""Trains a real run in this process, in seconds, and opens it as training does: for tests of what comes after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from invdist import config as configs
from invdist.data.dataset import Dataset
from invdist.embeddings.comm import Comm
from invdist.learning.strategy import Strategy
from invdist.runtime.process import single_rank
from invdist.training import run_folder
from invdist.training.checkpoint import CheckpointStore
from invdist.training.scoring import score_pairs
from invdist.training.trainer import Trainer, build_model, build_strategy
from invdist.training.vectors import load_or_learn

SETTINGS: dict[str, Any] = {
    "method": "ig",
    "data": {"batch_size": 256, "readers": 0},
    "rows": {"dim": 8, "sharding": "row_wise", "bias": True},
    "training": {"epochs": 3},
    "optimizer": {"gamma": 0.03},
    "ray": {"workers": 1},
    "ig": {"alpha_ratio": 1.0},
}


def train_here(data: Path, run: Path, *overrides: str) -> Path:
    """Makes a run folder as `invdist train` does, trains to the end on one rank without Ray, and gives the folder."""
    given = [f"data.path={data}", f"runs={run.parent}", f"name={run.name}", *overrides]
    config = configs.from_mapping(SETTINGS, given)
    folder = run_folder.create(config, Dataset.open(str(data)))
    with single_rank():
        Trainer(config, folder, device=torch.device("cpu")).fit()
    return Path(str(folder))


@contextmanager
def trained_strategy(run: Path) -> Iterator[Strategy]:
    """The best checkpoint of a run in the strategy and the sharded model of training: what serving is compared with."""
    config, folder = run_folder.reopen(run, [])
    with single_rank():
        comm = Comm()
        store = CheckpointStore(run_folder.checkpoints(config, folder), comm)
        best = store.best()
        assert best is not None
        dataset = Dataset.open(config.data.path)
        cpu = torch.device("cpu")
        vectors = load_or_learn(config, dataset, device=cpu, comm=comm) if config.exposures.vectors else None
        strategy = build_strategy(config, dataset, build_model(config, dataset, cpu, comm, vectors))
        store.load(best, strategy.model, strategy)
        yield strategy


def scores_of_training(run: Path, user: np.ndarray, item: np.ndarray) -> np.ndarray:
    """Logits of pairs by the strategy that was trained."""
    with trained_strategy(run) as strategy:
        return score_pairs(strategy, user, item, 1000)
