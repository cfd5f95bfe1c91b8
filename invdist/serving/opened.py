"""A trained run opened to be used: its settings, data set and best checkpoint as one frozen model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from invdist.config import Config
from invdist.config.registry import BACKBONES, STRATEGIES
from invdist.data.dataset import Dataset
from invdist.data.schema import TRAINING_LABELED
from invdist.models.frozen import FrozenModel
from invdist.serving.ids import RawIds
from invdist.training import run_folder
from invdist.training.checkpoint import CheckpointInfo, CheckpointStore
from invdist.training.trained import best_checkpoint


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """What is needed to score raw pairs with a run."""

    folder: Path
    config: Config
    dataset: Dataset
    checkpoint: CheckpointInfo
    model: FrozenModel
    users: RawIds
    items: RawIds

    @property
    def prior(self) -> float:
        """The fallback score of what the model does not know: log-odds of the training labels, one row added to each
        class."""
        classes = [self.dataset.manifest["classes"][split] for split in TRAINING_LABELED]
        positives, negatives = (sum(c[kind] for c in classes) + 1 for kind in ("positives", "negatives"))
        return math.log(positives / negatives)


def open_run(run: str | Path, overrides: list[str] | None = None) -> OpenedRun:
    """Opens the best checkpoint of a run (the newest, if none was ever the best) in this process.

    `overrides` change settings that do not change the model, such as `data.path` when the data set has moved. Raises
    `UserError` if the folder is no run, has no checkpoint, or its data set is another one now. The dense part computes
    in float32 whatever `training.precision` was.
    """
    config, folder = run_folder.reopen(run, overrides or [])
    dataset = run_folder.data_of(config, run)
    checkpoint = best_checkpoint(CheckpointStore(run_folder.checkpoints(config, folder), None), run, dataset)
    ids = (RawIds("user", dataset.raw_ids("users")), RawIds("item", dataset.raw_ids("items")))
    return OpenedRun(folder, config, dataset, checkpoint, freeze(config, dataset, checkpoint), *ids)


def freeze(config: Config, dataset: Dataset, checkpoint: CheckpointInfo) -> FrozenModel:
    """The model of a checkpoint, read without its optimizer."""
    own = STRATEGIES.get(config.method).frozen(config.strategy, dataset.users, checkpoint.read_strategy_state())
    if own is not None:
        return own
    rows = config.rows
    backbone = BACKBONES.get(config.model)(dim=rows.dim, dropout=config.tower.dropout, bias=rows.bias)
    backbone.load_state_dict(checkpoint.read_dense())
    user, item = (torch.from_numpy(checkpoint.read_rows(table, slice(None))) for table in ("user", "item"))
    return FrozenModel(user, item, backbone)
