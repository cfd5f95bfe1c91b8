"""Whether a checkpoint can be continued with the present settings: read from its manifest alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from invdist import config as configs
from invdist.config import Config
from invdist.config.plain_yaml import dotted, parse
from invdist.data.dataset import Dataset
from invdist.learning.strategy import Phase
from invdist.runtime.errors import UserError
from invdist.runtime.paths import AnyPath
from invdist.training import run_folder
from invdist.training.build import phases_of
from invdist.training.checkpoint import Position
from invdist.training.checkpoint.folder import CheckpointFolder

_ALWAYS_FIXED = ("method", "model", "rows.dim", "rows.bias", "rows.optimizer", "training.metric", "exposures.vectors")
"""What a checkpoint's tensors are, and what its metric means."""
_FIXED_WITH_VECTORS = tuple(f"exposures.{name}" for name in ("dim", "learned", "shrink", "products", "hidden"))
"""What else decides the columns and the head of a model with exposure vectors, beside the version of `shrink`."""
_FIXED_WITHIN_EPOCH = ("data.batch_size", "data.window_rows", "seed")
"""What gives the position within an epoch its meaning, beside `unlabeled.*` and the strategy's phases."""


def check_resume(config: Config, run: AnyPath, dataset: Dataset) -> None:
    """Raises `UserError` if the run cannot continue with `config`. Reads manifests only; a new run passes."""
    newest = CheckpointFolder(run_folder.checkpoints(config, run)).latest(valid_only=True)
    if newest is not None:
        check_continues(newest.path, newest.position, newest.extra, config, dataset, phases_of(config, dataset))


def check_continues(
    path: str, position: Position, extra: Mapping[str, Any], config: Config, dataset: Dataset, phases: Sequence[Phase]
) -> None:
    """Raises `UserError` if the data set or a setting differs that a resumed run cannot change.

    `position` and `extra` are those of the checkpoint at `path`.
    """
    if extra["dataset"] != dataset.fingerprint:
        raise UserError(
            f"{path} was trained on another data set than {config.data.path}: "
            "resume with the data set of the run, or start a new run that goes on from it on this one with --from"
        )
    check_same_model(path, extra, config)
    grew = config.growth.run is not None and config.exposures.vectors
    if grew and (products := _changed(extra, config, ["growth.products"])):
        raise UserError(f"{path} was trained with {products}, which decides its vectors: leave it as it was")
    if extra.get("falling") and (epochs := _changed(extra, config, ["growth.epochs"])):
        raise UserError(
            f"{path} was trained with {epochs}, and its rates fall to zero over these epochs: leave it as it was, "
            "or go on from it with a new run (--from)"
        )
    if (position.phase, position.pass_index, position.step) == (0, 0, 0):  # between two epochs
        return
    keys = dotted(parse(configs.dump(config).encode(), "settings"))
    fixed = [*_FIXED_WITHIN_EPOCH, *(key for key in keys if key.startswith("unlabeled."))]
    if _known_fields(extra.get("phases", described(phases))) != described(phases):
        fixed += [key for key in keys if key.startswith(f"{config.method}.")]
    if within := _changed(extra, config, fixed):
        raise UserError(
            f"{path} is at step {position.step:,} of an epoch with {within}, which cannot change within an "
            "epoch: resume with that, or start a new run"
        )


def check_same_model(path: str, extra: Mapping[str, Any], config: Config) -> None:
    """Raises `UserError` if `config` is of another model than the checkpoint at `path`, whatever the data set is."""
    fixed = [*_ALWAYS_FIXED]
    if config.exposures.vectors:
        fixed += [*_FIXED_WITH_VECTORS, *(["exposures.version"] if config.exposures.shrink else [])]
    if always := _changed(extra, config, fixed):
        raise UserError(
            f"{path} was trained with {always}, which cannot change: leave it as it was, or train a new run"
        )


def _changed(extra: Mapping[str, Any], config: Config, keys: Sequence[str]) -> str:
    """Those of the settings `keys` that differ from the ones of a checkpoint, with their values there."""
    texts = extra["config"], configs.dump(config)
    before, now = (dotted(parse(text.encode(), "settings")) for text in texts)
    before.setdefault("exposures.vectors", False)  # checkpoints of earlier versions do not say
    before.setdefault("exposures.shrink", False)
    before.setdefault("exposures.version", 2)
    return ", ".join(f"{key}={before[key]}" for key in keys if key in before and before[key] != now.get(key))


def _known_fields(saved: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Phases of a checkpoint without fields that a phase no longer has (`epochs`, which was null)."""
    names = {field.name for field in dataclasses.fields(Phase)}
    return [{name: value for name, value in phase.items() if name in names} for phase in saved]


def described(phases: Sequence[Phase]) -> list[Any]:
    """Phases as a checkpoint stores them."""
    return json.loads(json.dumps([dataclasses.asdict(phase) for phase in phases]))
