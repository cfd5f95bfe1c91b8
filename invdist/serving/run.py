"""Opens a trained run in this process: its settings, its data set, and one checkpoint as a frozen model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from invdist.config import Config
from invdist.data.dataset import Dataset
from invdist.models.frozen import FrozenModel
from invdist.runtime.errors import UserError
from invdist.runtime.paths import AnyPath
from invdist.serving.tables import CheckpointTables
from invdist.training import run_folder
from invdist.training.checkpoint import CheckpointInfo
from invdist.training.checkpoint.folder import CheckpointFolder
from invdist.training.history import epoch_of
from invdist.training.resume import check_same_model

if TYPE_CHECKING:
    from invdist.serving.raw_ids import RawIds


@dataclass(frozen=True)
class TrainedRun:
    """What is needed to score pairs with a run."""

    folder: AnyPath
    config: Config
    dataset: Dataset
    checkpoint: CheckpointInfo

    @cached_property
    def tables(self) -> CheckpointTables:
        """The tables, to be read piece by piece."""
        return CheckpointTables(self.config, self.dataset, self.checkpoint)

    @cached_property
    def model(self) -> FrozenModel:
        """The model with whole tables in this process."""
        return self.tables.whole()

    @cached_property
    def users(self) -> RawIds:
        """Raw ids of users, by index."""
        return self._raw_ids("users")

    @cached_property
    def items(self) -> RawIds:
        """Raw ids of items, by index."""
        return self._raw_ids("items")

    def raw_id_bytes(self) -> int:
        """What the raw ids of users and items take in memory, about."""
        files = self.dataset.manifest["files"]
        return 8 * (self.dataset.users + self.dataset.items) + sum(files[name]["bytes"] for name in ("users", "items"))

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


def open_run(run: str | AnyPath, overrides: Sequence[str] = (), checkpoint: str | int = "best") -> TrainedRun:
    """Opens a checkpoint of a run: `best` (the default), `last`, or a step.

    `overrides` change settings that do not change the model, such as `data.path` when the data set has moved. Raises
    `UserError` if the folder is no run, the checkpoint is missing or damaged, or the data set has changed. The dense
    part computes in float32 whatever `training.precision` was.
    """
    return loaded(find_run(run, overrides, checkpoint))


def loaded(run: TrainedRun) -> TrainedRun:
    """The run, after all files of its checkpoint were compared with their checksums and its tables were read."""
    run.checkpoint.verify()
    run.model  # noqa: B018 - what is wrong with it is told now
    return run


def find_run(run: str | AnyPath, overrides: Sequence[str] = (), checkpoint: str | int = "best") -> TrainedRun:
    """Opens a run as `open_run` does, but reads no tables yet and compares no checksums."""
    config, folder = run_folder.reopen(run, list(overrides))
    dataset = run_folder.data_of(config, run)
    info = _select(CheckpointFolder(run_folder.checkpoints(config, folder)), checkpoint)
    check_same_model(info.path, info.extra, config)
    _check_dataset(run, info, dataset, any(text.startswith("data.path=") for text in overrides))
    return TrainedRun(folder, config, dataset, info)


def _select(store: CheckpointFolder, which: str | int) -> CheckpointInfo:
    """The checkpoint asked for; `UserError` if it is missing, or if one of its files is or has another size."""
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
    return info


def _check_dataset(run: str | AnyPath, info: CheckpointInfo, dataset: Dataset, moved: bool) -> None:
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
