"""Small models on one or more ranks, stepped and compared: what the tests of checkpoints share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from invdist.config.registry import STRATEGIES
from invdist.data.stream.batches import Batch
from invdist.learning.strategy import Setting, Strategy
from invdist.models.build import ModelSpec, build_recommender
from invdist.runtime.process import single_rank

USERS, ITEMS, ROWS = 23, 31, 24


def build(method: str = "none", seed: int = 0, **spec: Any) -> Strategy:
    """A strategy over a fresh small model."""
    sizes = {"users": USERS, "items": ITEMS, "dim": 8, "gamma": 0.05} | spec
    model = build_recommender(ModelSpec(seed=seed, **sizes), torch.device("cpu"))
    setting = Setting(
        options=STRATEGIES.get(method).Config(),
        unlabeled_rate=1,
        gamma=0.05,
        users=sizes["users"],
        items=sizes["items"],
    )
    return STRATEGIES.get(method)(setting, model)


def train(strategy: Strategy, steps: range) -> None:
    """Takes the given steps, going round the phases."""
    comm, phases = strategy.model.comm, strategy.phases(strategy.setting)
    for step in steps:
        phase = phases[step % len(phases)]
        source = np.random.default_rng(step)
        extra = max(1, phase.unlabeled_per_row)
        user, item = source.integers(USERS, size=ROWS), source.integers(ITEMS, size=ROWS)
        label, other = source.integers(2, size=ROWS), source.integers(ITEMS, size=(ROWS, extra))
        mine = slice(ROWS * comm.rank // comm.size, ROWS * (comm.rank + 1) // comm.size)
        batch = Batch(
            torch.tensor(user[mine]),
            torch.tensor(item[mine]),
            torch.tensor(label[mine]).float(),
            torch.tensor(user[mine]).repeat_interleave(extra) if phase.unlabeled_per_row else None,
            torch.tensor(other[mine]).reshape(-1) if phase.unlabeled_per_row else None,
            global_rows=ROWS,
            step=step,
        )
        exchange = strategy.model.exchange(*strategy.groups(phase, batch))
        exchange.finish()
        strategy.step(phase, batch, exchange)


def held(strategy: Strategy) -> dict[tuple[str, int, int], np.ndarray]:
    """Copies of everything this rank holds: (name, first row, first column) -> values."""
    model = strategy.model
    rows, found = model.rows, {}
    for shard in rows.layout.on(model.comm.rank):
        for kind, local_rows in {"weight": rows.local_rows, **rows.optimizer.state}.items():
            values = local_rows[shard.base : shard.base + shard.rows].numpy().copy()
            found[f"{shard.table}.{kind}", shard.row, shard.column if values.ndim > 1 else 0] = values
    for name, (first, values) in strategy.sharded_state().items():
        found[f"sharded.{name}", first, 0] = values.numpy().copy()
    for name, value in (*model.backbone.state_dict().items(), *strategy.state().items()):
        found[name, 0, 0] = value.numpy().copy()
    for name, parameter in model.backbone.named_parameters():
        for key, value in model.dense_optimizer.state[parameter].items():
            found[f"{name}.{key}", 0, 0] = value.numpy().copy()
    found["steps", 0, 0] = np.array(rows.optimizer.steps)
    return found


def assembled(ranks: list[dict[tuple[str, int, int], np.ndarray]]) -> dict[str, np.ndarray]:
    """Whole tensors from what the ranks hold; what several hold must be the same."""
    sizes: dict[str, tuple[int, ...]] = {}
    for found in ranks:
        for (name, row, column), values in found.items():
            end = (row + values.shape[0], *values.shape[1:]) if values.ndim else ()
            end = (end[0], column + end[1]) if len(end) == 2 else end
            old = sizes.get(name, end)
            sizes[name] = tuple(max(a, b) for a, b in zip(old, end, strict=True))
    whole: dict[str, np.ndarray] = {}
    seen: dict[str, np.ndarray] = {}
    for found in ranks:
        for (name, row, column), values in found.items():
            target = whole.setdefault(name, np.zeros(sizes[name], values.dtype))
            filled = seen.setdefault(name, np.zeros(sizes[name], bool))
            if values.ndim == 0:
                place: Any = ()
            elif values.ndim == 2:
                place = (slice(row, row + len(values)), slice(column, column + values.shape[1]))
            else:
                place = slice(row, row + len(values))
            old = filled[place]
            assert (np.asarray(target[place])[old] == np.asarray(values)[old]).all(), name
            target[place], filled[place] = values, True
    assert all(filled.all() for filled in seen.values())
    return whole


def same(a: dict[Any, np.ndarray], b: dict[Any, np.ndarray]) -> bool:
    """Whether two sets of tensors are equal to the bit."""
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and a[k].tobytes() == b[k].tobytes() for k in a
    )


@contextmanager
def this_process() -> Iterator[None]:
    """This process as the only rank, on one thread as ranks have it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with single_rank():
            yield
    finally:
        torch.set_num_threads(threads)
