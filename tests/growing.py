"""Days of plays, and runs that go on from the day before: for tests of models that grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import torch

from invdist.data.dataset import Dataset
from invdist.data.prepare.options import build_options
from invdist.data.prepare.pipeline import prepare_log
from invdist.runtime.process import single_rank
from invdist.training import run_folder
from invdist.training.growth import check_growth, settings_from
from invdist.training.trainer import Trainer

QUICK = ("method=none", "data.batch_size=64", "rows.dim=8", "optimizer.gamma=0.02", "growth.epochs=1")
VECTORS = (
    "exposures.vectors=true",
    "exposures.learned=16",
    "exposures.dim=8",
    "exposures.products=2",
    "growth.products=2",
)


def a_day(folder: Path, name: str, users: range, onto: str | None = None, seed: int = 0, **options: Any) -> Path:
    """Plays of some users; whoever has an even number likes even items."""
    rng = np.random.default_rng(seed)
    user, item = (a.ravel() for a in np.meshgrid(list(users), np.arange(40), indexing="ij"))
    shown = rng.random(len(user)) < 0.6
    user, item = user[shown], item[shown]
    liked = rng.random(len(user)) < np.where(user % 2 == item % 2, 0.9, 0.1)
    log = folder / f"{name}.csv"
    pc.write_csv(pa.table({"user": user, "item": item, "label": liked.astype(int)}), log)
    options = {"rule": "label", "test_fraction": 0.0, **options}
    prepare_log(build_options("ratings", options), [log], folder / name, onto=folder / onto if onto else None)
    return folder / name


def grow_here(parent: Path, run: Path, *overrides: str) -> Path:
    """A run that goes on from another, on one rank without Ray."""
    config = settings_from(str(parent), [f"runs={run.parent}", f"name={run.name}", *overrides])
    dataset = Dataset.open(config.data.path)
    check_growth(config, dataset)
    folder = run_folder.create(config, dataset)
    with single_rank():
        Trainer(config, folder, device=torch.device("cpu")).fit()
    return Path(str(folder))
