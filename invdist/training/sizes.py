"""Settings that are `auto`: numbers that suit the size of the data set, chosen before a run starts."""

from __future__ import annotations

from typing import TypeVar

import torch

from invdist.config import Config
from invdist.config.registry import STRATEGIES
from invdist.data.dataset import Dataset
from invdist.data.schema import TRAINING_LABELED
from invdist.models.build import build_backbone
from invdist.training.second_rank import StepCost, own_cores, threads_pay

_Number = TypeVar("_Number", int, float)

_BATCH_BELOW = ((100_000, 1024), (2_000_000, 4096))
"""(labels, batch size): the batch size below so many training labels."""
_LARGEST_BATCH = 16384
_STEPS_PER_EPOCH = 25
"""An epoch has at least this many steps: with fewer, an epoch gains less than validation varies, and patience ends."""
_PATIENCE, _PATIENT_STEPS = 3, 300
"""Epochs without a better metric after which a run ends, and the least steps: where epochs are short, metrics rise
slowly and vary, and the first epoch may be the best of many by luck."""
_GAMMA, _GAMMA_BATCH = 1e-3, 1024
"""gamma at this batch size; it grows with the square root of the batch, as the noise of a gradient falls."""


def suited(config: Config, dataset: Dataset) -> Config:
    """A copy of `config` with a number for every `auto`, by the rule in docs/using.md.

    Without exposure vectors where nothing would read them; other settings are unchanged.
    """
    suited = config.model_copy(deep=True)
    suited.exposures.vectors &= STRATEGIES.get(suited.method).reads_rows
    rows, ray = dataset.rows, suited.ray
    labels = sum(rows[split] for split in TRAINING_LABELED)
    if suited.data.batch_size == "auto":
        size = next((size for below, size in _BATCH_BELOW if labels < below), _LARGEST_BATCH)
        # Every worker has at least one row of a step.
        least = 1 if ray.workers == "auto" else ray.workers
        suited.data.batch_size = max(min(size, rows["train"] // _STEPS_PER_EPOCH), least)
    if suited.training.patience == "auto":
        steps = -(-labels // suited.data.batch_size)
        suited.training.patience = max(_PATIENCE, -(-_PATIENT_STEPS // max(steps, 1)))
    if ray.workers == "auto":
        cores, gpus = own_cores(), 0 if ray.device == "cpu" else torch.cuda.device_count()
        cost, batch = cost_of(suited), suited.data.batch_size
        # On two cores two threads were never slower than two workers; with more, nobody has measured it.
        ray.workers = min(gpus, batch) or cost.best_ranks(batch, cores if cores > 2 else 1)
        if ray.workers == 1 and not gpus and threads_pay(cost, batch):
            ray.cpus_per_worker = max(ray.cpus_per_worker, float(cores))
    if suited.optimizer.gamma == "auto":
        suited.optimizer.gamma = _GAMMA * (suited.data.batch_size / _GAMMA_BATCH) ** 0.5
    return suited


def again_automatic(config: Config, dataset: Dataset) -> list[str]:
    """Settings of a run on `dataset` that are what `auto` gives there, as `key=auto`: for a run on another data set."""
    unset = config.model_copy(deep=True)
    unset.data.batch_size = unset.optimizer.gamma = "auto"
    chosen, found = suited(unset, dataset), []
    if config.data.batch_size == chosen.data.batch_size:
        found.append("data.batch_size=auto")
    if config.optimizer.gamma == chosen.optimizer.gamma:
        found.append("optimizer.gamma=auto")
    return found


def cost_of(config: Config) -> StepCost:
    """What a step of a config costs on the CPU."""
    with torch.device("meta"):  # shapes without memory
        return StepCost.of(build_backbone(config.model, config.rows, config.tower, config.exposures))


def batch_size(config: Config) -> int:
    """`data.batch_size` of settings that `suited` has seen."""
    return _resolved("data.batch_size", config.data.batch_size)


def patience(config: Config) -> int:
    """`training.patience` of settings that `suited` has seen."""
    return _resolved("training.patience", config.training.patience)


def gamma(config: Config) -> float:
    """`optimizer.gamma` of settings that `suited` has seen."""
    return _resolved("optimizer.gamma", config.optimizer.gamma)


def _resolved(key: str, value: _Number | str) -> _Number:
    if isinstance(value, str):
        raise ValueError(f"{key} is {value}: it has no number before `suited` has seen the data set")
    return value
