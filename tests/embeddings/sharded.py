"""What the tests of sharded training share: batches cut over ranks, and whole weights put together again."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from invdist.data.stream.batches import Batch
from invdist.models.build import ModelSpec
from invdist.models.recommender import Recommender

USERS, ITEMS, DIM = 13, 17, 4
SHARDINGS = ("row_wise", "table_wise", "column_wise", "data_parallel", "row_wise/data_parallel")
"""One for both tables, or those of users and items."""
MODELS = ("gmf", "neumf")


def small_spec(**options: Any) -> ModelSpec:
    """A small model whose first weights are large enough for gradients to matter."""
    options |= sharding_options(options.get("sharding", "row_wise"))
    return ModelSpec(**{"users": USERS, "items": ITEMS, "dim": DIM, "init_std": 0.5, "gamma": 0.01, **options})


def sharding_options(sharding: str) -> dict[str, Any]:
    """The settings of one of `SHARDINGS`."""
    users, _, items = sharding.partition("/")
    return {"sharding": users, "item_sharding": items or None}


@dataclass(slots=True)
class Step:
    """One global step: V labeled, U unlabeled."""

    V: tuple[Tensor, Tensor, Tensor]
    U: tuple[Tensor, Tensor]

    def cut(self, rank: int, ranks: int, step: int) -> Batch:
        """The share of a rank: uneven, and now and then nothing."""
        source = np.random.default_rng([step, ranks])
        parts = []
        for tensors in (self.V, self.U):
            inner = source.integers(0, len(tensors[0]) + 1, ranks - 1)
            edges = list(pairwise([0, *sorted(inner.tolist()), len(tensors[0])]))
            first, end = edges[rank]
            parts += [tensor[first:end] for tensor in tensors]
        return Batch(*parts, global_rows=len(self.V[0]), step=step)


def steps(count: int, seed: int) -> list[Step]:
    """Global steps of few ids, so that ids repeat within a batch and across ranks.

    The lower ids are in V alone, the upper in U alone, those between in both; the last of each table in neither.
    """
    source = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, rows: int) -> Tensor:
        return torch.randint(low, high, (rows,), generator=source)

    made = []
    for _ in range(count):
        rows = int(draw(5, 14, 1))
        V = draw(0, USERS - 4, rows), draw(0, ITEMS - 5, rows), draw(0, 2, rows).float()
        U = draw(3, USERS - 1, rows + 2), draw(4, ITEMS - 1, rows + 2)
        made.append(Step(V, U))
    return made


def local_weights(model: Recommender) -> dict[str, list[tuple[int, int, np.ndarray]]]:
    """This rank's weights: for each tensor the parts (row, column, values) that it holds."""
    parts: dict[str, list[tuple[int, int, np.ndarray]]] = {"user": [], "item": []}
    for shard in model.rows.layout.on(model.comm.rank):
        values = model.rows.local_rows[shard.base : shard.base + shard.rows]
        parts[shard.table].append((shard.row, shard.column, values.numpy().copy()))
    for name, value in model.backbone.state_dict().items():
        parts[name] = [(0, 0, np.atleast_2d(value.numpy().copy()))]
    return parts


def whole_weights(by_rank: list[dict[str, list[tuple[int, int, np.ndarray]]]], model: str) -> dict[str, Tensor]:
    """Whole tensors from the parts of all ranks, by the names of the oracle; ranks that hold the same agree."""
    columns = DIM if model == "gmf" else 5 * DIM
    weights: dict[str, Tensor] = {}
    for name in by_rank[0]:
        parts = [part for rank in by_rank for part in rank[name]]
        shape = {"user": (USERS, columns), "item": (ITEMS, columns)}.get(name, parts[0][2].shape)
        whole = np.full(shape, np.nan, np.float32)
        for row, column, values in parts:
            place = whole[row : row + values.shape[0], column : column + values.shape[1]]
            assert np.all(np.isnan(place) | (place == values)), f"ranks hold different {name}"
            place[:] = values
        assert not np.isnan(whole).any(), f"no rank holds some of {name}"
        weights[name] = torch.from_numpy(whole[0] if name.endswith("bias") else whole)
    return weights


def largest_difference(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Over all weights."""
    assert got.keys() == expected.keys()
    return max(float((got[name].double() - expected[name].double()).abs().max()) for name in expected)
