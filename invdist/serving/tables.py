"""The tables of a checkpoint as a model reads them, any range of rows at a time, without an optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

import torch
from torch import Tensor

from invdist.config import Config
from invdist.config.registry import STRATEGIES
from invdist.data.dataset import Dataset
from invdist.models.backbone import Backbone
from invdist.models.build import build_backbone
from invdist.models.frozen import FrozenModel
from invdist.runtime.errors import UserError
from invdist.training.checkpoint import CheckpointInfo
from invdist.training.vectors import finished_vectors, read_vectors, vectors_folder

_BLOCK_ROWS = 1 << 18


class _StrategyState(Mapping[str, Tensor]):
    """The state of the strategy, each tensor read when it is asked for: most strategies need none of it to score."""

    def __init__(self, checkpoint: CheckpointInfo) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, name: str) -> Tensor:
        return self._checkpoint.read(f"strategy/{name}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.names("strategy/"))

    def __len__(self) -> int:
        return len(self._checkpoint.names("strategy/"))


class CheckpointTables:
    """Tables `user` and `item`, exposure vectors behind the trained columns, and the backbone over them.

    Only the files with rows that are asked for are read. A strategy with a model of its own (`means`) is the exception:
    its state is small and is read whole.
    """

    def __init__(self, config: Config, dataset: Dataset, checkpoint: CheckpointInfo) -> None:
        self._config, self._dataset, self._checkpoint = config, dataset, checkpoint
        self.rows_of = {"user": dataset.users, "item": dataset.items}

    @cached_property
    def backbone(self) -> Backbone:
        """The dense part, ready to score."""
        if self._own is not None:
            return self._own.backbone
        config = self._config
        backbone = build_backbone(config.model, config.rows, config.tower, config.exposures)
        backbone.load_state_dict(self._checkpoint.read_dense())
        return backbone.requires_grad_(False).eval()

    @property
    def columns(self) -> int:
        """Columns of a row, frozen ones included."""
        return self.backbone.columns + (self.backbone.frozen_columns if self._vectors else 0)

    @property
    def bytes(self) -> int:
        """What both tables take in memory."""
        return 4 * self.columns * sum(self.rows_of.values())

    def whole(self) -> FrozenModel:
        """The model with both tables in this process."""
        user, item = (self.rows(name, 0, rows) for name, rows in self.rows_of.items())
        return FrozenModel(user, item, self.backbone)

    def rows(self, table: str, first: int, end: int) -> Tensor:
        """Rows `[first, end)` of a table: float32 `[end - first, columns]`."""
        if self._own is not None:
            return getattr(self._own, table)[first:end]
        rows = torch.empty((end - first, self.columns))
        trained = self.backbone.columns
        self._checkpoint.read_into(f"rows/{table}/weight", rows[:, :trained], first)
        if self._vectors is not None:
            for start in range(first, end, _BLOCK_ROWS):
                stop = min(start + _BLOCK_ROWS, end)
                block = read_vectors(self._vectors, table, self._config.exposures, start, stop)
                rows[start - first : stop - first, trained:] = block
        return rows

    @cached_property
    def _own(self) -> FrozenModel | None:
        strategy, state = STRATEGIES.get(self._config.method), _StrategyState(self._checkpoint)
        return strategy.frozen(self._config.strategy, self._dataset.users, state)

    @cached_property
    def _vectors(self) -> CheckpointInfo | None:
        if not self._config.exposures.vectors or self._own is not None:
            return None
        folder = vectors_folder(self._config, self._dataset)
        found = finished_vectors(folder, self._dataset)
        if found is None:
            raise UserError(
                f"the exposure vectors of the run are not in {folder}: give the folder that holds them as "
                "exposures.path=, or learn them again with invdist train --resume"
            )
        found.cache_bytes = self._checkpoint.cache_bytes
        return found
