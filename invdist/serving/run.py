"""Opens a trained run in this process: its settings, its data set, and one checkpoint as a frozen model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from invdist.config import Config
from invdist.config.registry import STRATEGIES
from invdist.data.dataset import Dataset
from invdist.models.build import build_backbone
from invdist.models.frozen import FrozenModel
from invdist.runtime.errors import UserError
from invdist.training import run_folder
from invdist.training.checkpoint import CheckpointInfo
from invdist.training.checkpoint.folder import CheckpointFolder
from invdist.training.history import epoch_of
from invdist.training.vectors import finished_vectors, read_vectors, vectors_folder

if TYPE_CHECKING:
    from invdist.serving.raw_ids import RawIds


@dataclass(frozen=True)
class TrainedRun:
    """What is needed to score pairs with a run."""

    folder: Path
    config: Config
    dataset: Dataset
    checkpoint: CheckpointInfo
    model: FrozenModel

    @cached_property
    def users(self) -> RawIds:
        """Raw ids of users, by index."""
        return self._raw_ids("users")

    @cached_property
    def items(self) -> RawIds:
        """Raw ids of items, by index."""
        return self._raw_ids("items")

    @cached_property
    def prior(self) -> float:
        """The score of a pair without the model: log-odds of the training labels, one row added to each class."""
        classes = [self.dataset.manifest["classes"][split] for split in ("train", "training_test")]
        positives, negatives = (sum(c[kind] for c in classes) + 1 for kind in ("positives", "negatives"))
        return math.log(positives / negatives)

    def about_checkpoint(self) -> dict[str, Any]:
        """The checkpoint in use, for every output: step, epoch (as in the log), metric, and a digest of its files.

        Two checkpoints are the same exactly if this is equal.
        """
        info = self.checkpoint
        position = info.position
        return {
            "step": info.step,
            "epoch": epoch_of(position),
            self.config.training.metric: info.metric,
            "digest": hashlib.sha256("\n".join(info.checksums()).encode()).hexdigest()[:16],
        }

    def _raw_ids(self, entity: Any) -> RawIds:
        from invdist.serving.raw_ids import RawIds  # pyarrow.compute takes a while to import

        return RawIds(self.dataset.raw_ids(entity))


def open_run(run: str | Path, overrides: Sequence[str] = (), checkpoint: str | int = "best") -> TrainedRun:
    """Opens a checkpoint of a run: `best` (the default), `last`, or a step.

    `overrides` change settings that do not change the model, such as `data.path` when the data set has moved. Raises
    `UserError` if the folder is no run, the checkpoint is missing or damaged, or the data set has changed. The dense
    part computes in float32 whatever `training.precision` was.
    """
    config, folder = run_folder.reopen(run, list(overrides))
    dataset = run_folder.data_of(config, run)
    info = _select(CheckpointFolder(run_folder.checkpoints(config, folder)), checkpoint)
    _check_dataset(run, info, dataset, any(text.startswith("data.path=") for text in overrides))
    return TrainedRun(folder, config, dataset, info, freeze(config, dataset, info))


def freeze(config: Config, dataset: Dataset, checkpoint: CheckpointInfo) -> FrozenModel:
    """The model of a checkpoint, read without its optimizer."""
    own = STRATEGIES.get(config.method).frozen(config.strategy, dataset.users, checkpoint.read_strategy_state())
    if own is not None:
        return own
    backbone = build_backbone(config.model, config.rows, config.tower, config.exposures)
    backbone.load_state_dict(checkpoint.read_dense())
    user, item = (torch.from_numpy(checkpoint.read_rows(table, slice(None))) for table in ("user", "item"))
    if config.exposures.vectors:
        user, item = _with_vectors(config, dataset, user, item)
    return FrozenModel(user, item, backbone)


def _with_vectors(config: Config, dataset: Dataset, user: Tensor, item: Tensor) -> list[Tensor]:
    """Trained columns of both tables with the exposure vectors behind them."""
    folder = vectors_folder(config, dataset)
    found = finished_vectors(folder, dataset)
    if found is None:
        raise UserError(
            f"the exposure vectors of the run are not in {folder}: give the folder that holds them as exposures.path=, "
            "or learn them again with invdist train --resume"
        )
    tables = (("user", user), ("item", item))
    return [torch.cat([rows, read_vectors(found, name, config.exposures, 0, len(rows))], 1) for name, rows in tables]


def _select(store: CheckpointFolder, which: str | int) -> CheckpointInfo:
    """The checkpoint asked for, with every file checked; `UserError` if it is missing or damaged in any way."""
    info = store.select(which)
    if which == "best":
        outcomes = [other.extra.get("outcome") for other in store.intact()]
        metrics = [outcome.get("best") for outcome in outcomes if isinstance(outcome, dict)]
        best = max((metric for metric in metrics if isinstance(metric, float)), default=None)
        if best is not None and (info.metric is None or info.metric < best):
            raise UserError(
                f"the best checkpoint of {store.folder} (metric {best:.4f}) is no longer there; "
                f"choose another one with --checkpoint STEP: {', '.join(map(str, store.steps()))}"
            )
    info.verify()
    return info


def _check_dataset(run: str | Path, info: CheckpointInfo, dataset: Dataset, moved: bool) -> None:
    """`UserError` if `dataset` is not the one of the checkpoint; `moved`: the user has just said where it is."""
    trained_on = info.extra.get("dataset")
    if trained_on == dataset.fingerprint:
        return
    found = f"its fingerprint is {dataset.fingerprint}, the run's is {trained_on}"
    if moved:
        raise UserError(
            f"data.path={dataset.path} is not the data set that {run} was trained on ({found}): give the folder of an "
            "unchanged copy, or leave data.path out if that data set is still in its old place"
        )
    raise UserError(
        f"{dataset.path} is not the data set that {run} was trained on, it has changed since ({found}): restore it, "
        "or give the folder of an unchanged copy as data.path=FOLDER, or train a new run on the new data"
    )
