"""A model that goes on from another run's on a newer data set: everything that belongs to an id follows the id.

Ids are joined by their raw values, never by index, so an id cannot end in another's row, whatever was added, dropped or
reordered. Rows are read from the older checkpoint block by block: nobody holds a whole table.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import torch
from torch import Tensor

from invdist.config import Config
from invdist.data.dataset import Dataset
from invdist.embeddings.placement import ids_at
from invdist.embeddings.row_optimizers import Adam
from invdist.learning.strategy import Phase, Strategy
from invdist.models.anchor import Anchor
from invdist.models.exposure_head import ExposureHead
from invdist.models.recommender import Recommender
from invdist.runtime.errors import UserError
from invdist.training import run_folder
from invdist.training.checkpoint import CheckpointInfo, CheckpointStore, Position
from invdist.training.checkpoint.folder import CheckpointFolder
from invdist.training.checkpoint.state import restore_tables
from invdist.training.frozen_tables import frozen_tables
from invdist.training.pace import Pace
from invdist.training.replay import Replay
from invdist.training.resume import check_same_model
from invdist.training.sizes import again_automatic, batch_size

pc: Any = pyarrow.compute  # its functions are generated at import, unseen by type checkers

_BLOCK_ROWS = 1 << 16
_GRID = float(1 << 30)
"""Rows are rounded to 1 / _GRID before they are summed: such sums are exact in float64, so in any order the same."""


def settings_from(run: str, overrides: Sequence[str]) -> Config:
    """The settings of a new run that goes on from the best checkpoint of `run`: its own, with `overrides`.

    Sizes that were chosen for the older data set (`auto`) are chosen again for the newer one.
    """
    check_epochs(overrides)
    older = run_folder.reopen(run, [])[0]
    automatic = again_automatic(older, run_folder.data_of(older, run))
    config, folder = run_folder.reopen(run, [*automatic, *overrides])
    info = CheckpointFolder(run_folder.checkpoints(config, folder)).select("best")
    if not any(text.startswith("name=") for text in overrides):
        config.name = None
    for runs in (text.removeprefix("runs=") for text in overrides if text.startswith("runs=")):
        config.runs = runs
    config.growth.run, config.growth.checkpoint = str(folder), f"{info.step}-{digest(info)}"
    return config


def check_epochs(overrides: Sequence[str]) -> None:
    """`UserError` if a run that goes on from another is given epochs that it would not use."""
    if any(text.partition("=")[0].strip() == "training.epochs" for text in overrides):
        raise UserError("training.epochs: a run that goes on from another takes growth.epochs=N")


class Parent:
    """The run that a model grows from: its settings, its data set, and the checkpoint that was chosen at the start."""

    def __init__(self, config: Config) -> None:
        """Opens the parent that `config.growth` names; `UserError` if it is not there as it was."""
        assert config.growth.run is not None
        assert config.growth.checkpoint is not None
        run, (step, _, content) = config.growth.run, config.growth.checkpoint.partition("-")
        # Where the older data set has moved to, the parent's settings say so after `invdist train --resume`.
        self.config, self.folder = run_folder.reopen(run, [])
        self.dataset = run_folder.data_of(self.config, run)
        self.checkpoint = CheckpointFolder(run_folder.checkpoints(self.config, self.folder)).select(step)
        if digest(self.checkpoint) != content:
            raise UserError(
                f"{self.checkpoint.path} is no longer the checkpoint that this run was started from: start a new run "
                f"with --from {run}"
            )
        if self.checkpoint.extra.get("dataset") != self.dataset.fingerprint:
            raise UserError(f"{self.dataset.path} is not the data set that {run} was trained on: it has changed since")

    def check(self, config: Config, dataset: Dataset) -> str | None:
        """`UserError` if the model of `config` on `dataset` cannot go on from this one; else what is odd about it."""
        check_same_model(self.checkpoint.path, self.checkpoint.extra, config)
        position = self.checkpoint.position
        if (position.phase, position.pass_index, position.step) != (0, 0, 0):
            raise UserError(f"{self.checkpoint.path} is in the middle of an epoch: finish the run with --resume first")
        for entity in ("users", "items"):
            old, new = self.dataset.raw_id_type(entity), dataset.raw_id_type(entity)
            if old != new:
                raise UserError(
                    f"{entity} are {new} in {dataset.path} and {old} in {self.dataset.path}: cannot be joined"
                )
        if self.descends(dataset):
            return None
        return (
            f"{dataset.path} does not descend from {self.dataset.path}, which {self.folder.name} was trained on: its "
            "labels may mean something else (`invdist prepare --onto` makes one that does); ids are joined by raw id"
        )

    def descends(self, dataset: Dataset) -> bool:
        """Whether `dataset` is the older one, or was prepared onto it or a later day."""
        return self.dataset.fingerprint in (dataset.fingerprint, *dataset.manifest.get("ancestors", ()))

    def ids(self, dataset: Dataset) -> dict[str, np.ndarray]:
        """For each user and item of `dataset` its index (int64) in the older one, -1 if it is new there."""
        return {
            "user": joined(self.dataset.raw_ids("users"), dataset.raw_ids("users")),
            "item": joined(self.dataset.raw_ids("items"), dataset.raw_ids("items")),
        }


def digest(checkpoint: CheckpointInfo) -> str:
    """A short name of a checkpoint's content."""
    files = sorted(f"{name} {entry.sha256}" for name, entry in checkpoint.manifest.files.items())
    return hashlib.sha256("\n".join(files).encode()).hexdigest()[:16]


def check_growth(config: Config, dataset: Dataset) -> None:
    """Raises `UserError` if the run of `config` cannot grow from its parent; a run without one passes."""
    if config.growth.run is not None:
        Parent(config).check(config, dataset)


def joined(old: pa.Array, new: pa.Array) -> np.ndarray:
    """For each of the ids `new` its place (int64) among `old`, -1 if it is not there."""
    if new[: len(old)].equals(old):  # the usual case: nothing was dropped
        return np.concatenate([np.arange(len(old)), np.full(len(new) - len(old), -1)])
    found = pc.index_in(new, value_set=old)
    return pc.fill_null(found, -1).to_numpy(zero_copy_only=False).astype(np.int64)


class ById:
    """Fills the tables of a new model from an older checkpoint: known ids from their rows, new ones from the prior.

    `source` has for each present id its index in the older data set, or -1 (see `Parent.ids`).
    """

    def __init__(self, checkpoint: CheckpointInfo, source: dict[str, np.ndarray], model: Recommender) -> None:
        self.checkpoint, self.source, self._comm = checkpoint, source, model.comm
        backbone = model.backbone
        # Without labels the head has no opinion of its own: a new id is scored by its exposure vector.
        self._opinions = backbone.inner.columns if isinstance(backbone, ExposureHead) else backbone.columns
        self._priors = {table: self._mean(table) for table in source}
        self.renumbered = {table: self._renumbered(table) for table in source}

    def fill(self, name: str, table: str, values: Tensor, row: int = 0, column: int = 0, multiplier: int = 1) -> None:
        """Fills `values`, the rows of `table` from `row` on, with those of the tensor `name`, from `column` on.

        Rows of new ids get the prior if they are weights, and otherwise stay as they are.
        """
        ids = ids_at(row, row + len(values), len(self.source[table]), multiplier)
        source, values = self.source[table][ids.numpy()], values.view(len(values), -1)
        entry = self.checkpoint.manifest.tensors[name]

        def read(target: Tensor, first: int) -> None:
            self.checkpoint.read_into(name, target, first, column)

        copy_rows(read, entry.rows, source, values)
        if name.endswith("/weight"):
            prior = self._priors[table][column : column + values.shape[1]]
            values[torch.from_numpy(source < 0).to(values.device)] = prior.to(values)

    def _renumbered(self, table: str) -> Tensor:
        """For each id of the older data set its present index (int64), -1 if it was dropped."""
        source = self.source[table]
        index = np.full(self.checkpoint.manifest.tensors[f"rows/{table}/weight"].rows, -1)
        index[source[source >= 0]] = np.flatnonzero(source >= 0)
        return torch.from_numpy(index)

    def _mean(self, table: str) -> Tensor:
        """The mean row of an older table (float64), equal at any number of ranks and in any order of ids."""
        name = f"rows/{table}/weight"
        entry, (rank, ranks) = self.checkpoint.manifest.tensors[name], (self._comm.rank, self._comm.size)
        total = torch.zeros(entry.columns, dtype=torch.float64)
        for first in range(entry.rows * rank // ranks, end := entry.rows * (rank + 1) // ranks, _BLOCK_ROWS):
            block = torch.empty((min(_BLOCK_ROWS, end - first), entry.columns))
            self.checkpoint.read_into(name, block, first)
            total += (block.double() * _GRID).round_().sum(0)
        mean = self._comm.all_reduce(total.to(self._comm.device)).wait().cpu() / _GRID / max(entry.rows, 1)
        mean[self._opinions :] = 0.0
        return mean


def copy_rows(read: Callable[[Tensor, int], None], rows: int, source: np.ndarray, target: Tensor) -> None:
    """`target[i] = older[source[i]]` wherever `source[i]` is not -1, from an older matrix of `rows` rows.

    `read(block, first)` fills a block with its rows from `first` on; blocks that nobody needs are not read.
    """
    wanted = np.flatnonzero(source >= 0)
    wanted = wanted[np.argsort(source[wanted], kind="stable")]
    old = source[wanted]
    for low in range(0, rows, _BLOCK_ROWS):
        a, b = np.searchsorted(old, [low, low + _BLOCK_ROWS])
        if a == b:
            continue
        first = int(old[a])
        block = torch.empty((int(old[b - 1]) + 1 - first, target.shape[1]), dtype=target.dtype)
        read(block, first)
        moved = block[torch.from_numpy(old[a:b] - first)]
        target[torch.from_numpy(wanted[a:b]).to(target.device)] = moved.to(target.device)


def grow(
    config: Config, dataset: Dataset, store: CheckpointStore, strategy: Strategy
) -> tuple[Position, dict[str, Any], str | None]:
    """Makes a fresh strategy and its model on `dataset` those of the run that `config.growth` names, by id.

    Gives where training continues, what became of the ids (and whether the data set is a `newer` one), and a warning if
    the data sets are not related. Epochs and steps count on from the parent's: with the same data set this is a resume.
    """
    parent = Parent(config)
    warning, ids = parent.check(config, dataset), parent.ids(dataset)
    by_id = ById(parent.checkpoint, ids, strategy.model)
    position, _ = store.load(parent.checkpoint, strategy.model, strategy, by_id=by_id)
    about: dict[str, Any] = {"checkpoint": parent.checkpoint.path, "epoch": position.epoch}
    about["newer"] = parent.dataset.fingerprint != dataset.fingerprint
    for table, source in ids.items():
        about[f"known_{table}s"] = int(np.count_nonzero(source >= 0))
        about[f"new_{table}s"] = int(np.count_nonzero(source < 0))
        about[f"dropped_{table}s"] = int((by_id.renumbered[table] < 0).sum())
    return position, about, warning


_FASTER = 2
"""How much faster the head's own columns learn where old labels cannot lead them far away: steps are few."""


def hold(config: Config, dataset: Dataset, strategy: Strategy, phases: Sequence[Phase], pace: Pace) -> Replay | None:
    """Holds a model that grew to the older one, if its data set has set labels aside.

    Its rows stay near where they started (`Anchor`), and labels that train again say what the older model says, too:
    gives the `Replay` of every batch, and lets the head's own columns learn faster. The older model is read from its
    checkpoint, again by a run that is resumed.
    """
    model = strategy.model
    if not (pace.falling and dataset.manifest.get("set_aside") and isinstance(model.backbone, ExposureHead)):
        return None
    assert model.vectors is not None
    parent = Parent(config)
    older = frozen_tables(config, dataset, model.rows.columns, device=model.device, comm=model.comm)
    with older.rewriting():
        restore_tables(parent.checkpoint, older, ById(parent.checkpoint, parent.ids(dataset), model))
    older.freeze()
    counts = model.vectors.local_rows[:, model.backbone.dim + 1 :]
    steps = {"batch_size": batch_size(config), "steps": pace.steps_per_epoch}
    model.anchor = Anchor(older.local_rows, counts, model.backbone, **steps)
    if not _replays(dataset, parent, strategy, phases):
        return None
    optimizer = model.rows.optimizer
    assert isinstance(optimizer, Adam), "exposure vectors need it"
    own, head = optimizer.groups
    optimizer.groups = (own, head._replace(gamma=_FASTER * head.gamma))
    backbone = copy.deepcopy(model.backbone)
    backbone.load_state_dict(parent.checkpoint.read_dense())
    never = torch.optim.SGD(backbone.parameters(), lr=0.0)
    return Replay(Recommender(older, backbone, never, vectors=model.vectors), dataset.manifest["replay"])


def _replays(dataset: Dataset, parent: Parent, strategy: Strategy, phases: Sequence[Phase]) -> bool:
    """Whether the older model can speak for labels that train again: has it learned from them, and from nothing else?

    A loss of unlabeled pairs has moved it away from what labels say. A strategy may also have scores or pairs of its
    own.
    """
    learned = "replay" in dataset.manifest and dataset.manifest["ancestors"][-1] == parent.dataset.fingerprint
    plain = type(strategy).score is Strategy.score and type(strategy).groups is Strategy.groups
    return learned and plain and not any(phase.unlabeled_per_row for phase in phases)
