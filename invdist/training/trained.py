"""A trained run, opened again in one process: its settings, data set and best checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from invdist.config import Config
from invdist.data.dataset import Dataset
from invdist.embeddings.comm import Comm
from invdist.learning.strategy import Strategy
from invdist.runtime.errors import UserError
from invdist.training import run_folder
from invdist.training.checkpoint import CheckpointInfo, CheckpointStore
from invdist.training.trainer import build_model, build_strategy


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """What a finished (or interrupted) run gives to whoever uses its model."""

    run: Path
    config: Config
    dataset: Dataset
    strategy: Strategy
    checkpoint: str


@contextlib.contextmanager
def open_trained(run: str | Path, overrides: list[str] | None = None) -> Iterator[TrainedRun]:
    """Loads the best checkpoint of a run (the newest, if none was ever the best) on this process alone.

    `overrides` change settings that do not change the model, such as `data.path` when the data set has moved.
    """
    config, folder = run_folder.reopen(run, overrides or [])
    dataset = run_folder.data_of(config, run)
    with single_rank():
        comm = Comm()
        store = CheckpointStore(run_folder.checkpoints(config, folder), comm)
        info = best_checkpoint(store, run, dataset)
        config.rows.sharding = "row_wise"
        strategy = build_strategy(config, dataset, build_model(config, dataset, torch.device("cpu"), comm))
        store.load(info, strategy.model, strategy)
        yield TrainedRun(folder, config, dataset, strategy, info.path)


def best_checkpoint(store: CheckpointStore, run: str | Path, dataset: Dataset) -> CheckpointInfo:
    """The best checkpoint of a run, or the newest; `UserError` if there is none or it is of another data set."""
    info = store.best() or store.latest()
    if info is None:
        raise UserError(f"{run}: the run has no checkpoint yet: nothing was trained to the end of an epoch")
    if info.extra["dataset"] != dataset.fingerprint:
        raise UserError(
            f"{dataset.path} is not the data set that {run} was trained on (its fingerprint differs): "
            "give the right one as data.path=FOLDER"
        )
    return info


@contextlib.contextmanager
def single_rank() -> Iterator[None]:
    """A process group of this process alone, unless it is in one already."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
