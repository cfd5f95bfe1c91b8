"""Trains a real run in this process, in seconds: for tests of what comes after training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from invdist import config as configs
from invdist.data.dataset import Dataset
from invdist.training import run_folder
from invdist.training.trained import single_rank
from invdist.training.trainer import Trainer

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
    return folder
