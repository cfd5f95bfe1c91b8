"""Runs strategies on gloo ranks over given global batches, and hands back everything they changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from invdist.config import fields as settings
from invdist.config.registry import STRATEGIES
from invdist.embeddings import row_moves
from invdist.embeddings.exchange import Pairs
from invdist.learning.strategy import Phase, Record, Setting, Strategy
from invdist.models.build import ModelSpec, build_recommender
from invdist.models.recommender import Recommender

USERS, ITEMS, DIM, GAMMA = 13, 41, 8, 0.02
Arrays = dict[str, np.ndarray]


@dataclass
class Rows:
    """One step's rows: of all ranks, or after `cut` of one."""

    user: Tensor
    item: Tensor
    label: Tensor
    unlabeled_user: Tensor
    unlabeled_item: Tensor
    global_rows: int

    def cut(self, rank: int, world_size: int) -> Rows:
        """The part of one rank, as the stream cuts it."""
        n = self.global_rows
        low, high = n * rank // world_size, n * (rank + 1) // world_size
        k = len(self.unlabeled_user) // n
        other = self.unlabeled_user[low * k : high * k], self.unlabeled_item[low * k : high * k]
        return Rows(self.user[low:high], self.item[low:high], self.label[low:high], *other, n)


def batches(per_row: int, rows: Sequence[int] = (24, 17, 30, 1, 24), seed: int = 5) -> list[Rows]:
    """Global batches; the step of one row leaves a rank of two without any."""
    source = torch.Generator().manual_seed(seed)

    def ids(high: int, count: int) -> Tensor:
        return torch.randint(high, (count,), generator=source)

    made = []
    for n in rows:
        user = ids(USERS, n)
        label = (torch.rand(n, generator=source) < 0.6).float()
        unlabeled = user.repeat_interleave(per_row), ids(ITEMS, n * per_row)
        made.append(Rows(user, ids(ITEMS, n), label, *unlabeled, n))
    return made


@dataclass
class Run:
    """What to train, and where to start from."""

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    model: str = "gmf"
    rate: int = 1
    per_row: int = 0
    """Unlabeled rows per labeled row that the phase must ask for."""
    optimizer: Literal["adam", "sgd", "rowwise_adagrad"] = "adam"
    start: int = 0
    stop: int | None = None
    weights: Arrays | None = None
    state: Arrays | None = None
    sharded: dict[str, np.ndarray] | None = None
    end_epoch: bool = False
    as_on_gpu: bool = False
    """Without reading a value on the way."""


@dataclass
class Result:
    """What one rank saw."""

    before: Arrays
    after: Arrays
    losses: list[float]
    details: list[dict[str, Any]]
    state: Arrays
    sharded: dict[str, tuple[int, np.ndarray]]
    scores: np.ndarray
    """Logits of every user with item = user at the end."""


def execute(rank: int, world_size: int, run: Run) -> Result:
    """Trains `run` on this rank."""
    with pytest.MonkeyPatch.context() as patch:
        if run.as_on_gpu:
            patch.setattr(row_moves, "reads_are_free", lambda device: False)
        return _execute(rank, world_size, run)


def _execute(rank: int, world_size: int, run: Run) -> Result:
    model = build_recommender(
        ModelSpec(
            users=USERS,
            items=ITEMS,
            model=run.model,
            dim=DIM,
            init_std=0.5,
            gamma=GAMMA,
            optimizer=run.optimizer,
            seed=3,
        ),
        torch.device("cpu"),
    )
    strategy = build(run, model)
    if run.weights is not None:
        set_weights(model, run.weights)
    if run.state is not None:
        strategy.load_state({name: torch.from_numpy(value) for name, value in run.state.items()})
    for name, (first, tensor) in strategy.sharded_state().items():
        if run.sharded is not None:
            tensor.copy_(torch.from_numpy(run.sharded[name])[first : first + len(tensor)])
    before = get_weights(model)
    (phase,) = strategy.phases(strategy.setting)
    assert phase.unlabeled_per_row == run.per_row
    losses, details = [], []
    for rows in batches(run.per_row)[run.start : run.stop]:
        record = take_step(strategy, phase, rows.cut(rank, world_size))
        losses.append(float(record.loss))
        details.append(record.details)
    if run.end_epoch:
        strategy.end_epoch()
    everyone = torch.arange(USERS)
    return Result(
        before,
        get_weights(model),
        losses,
        details,
        {name: value.numpy().copy() for name, value in strategy.state().items()},
        {name: (first, value.numpy().copy()) for name, (first, value) in strategy.sharded_state().items()},
        strategy.score(Pairs(everyone, everyone)).numpy(),
    )


def build(run: Run, model: Recommender) -> Strategy:
    """The strategy of a run with its checked options."""
    options = settings.build(STRATEGIES.get(run.method).Config, run.options)
    setting = Setting(options=options, unlabeled_rate=run.rate, gamma=GAMMA, users=USERS, items=ITEMS, seed=9)
    return STRATEGIES.get(run.method)(setting, model)


def take_step(strategy: Strategy, phase: Phase, rows: Any) -> Record:
    """One step, as the engine takes it."""
    return strategy.step(phase, rows, strategy.model.exchange(*strategy.groups(phase, rows)).finish())


def get_weights(model: Recommender) -> Arrays:
    """All weights of all ranks, by the names of the textbook."""
    count = max(USERS, ITEMS)
    pairs = Pairs(torch.arange(count).clamp(max=USERS - 1), torch.arange(count).clamp(max=ITEMS - 1))
    user, item = model.rows.pull(model.exchange(pairs))[0].chunk(2)
    dense = {name: value.detach().numpy().copy() for name, value in model.backbone.state_dict().items()}
    return {"user": user[:USERS].numpy().copy(), "item": item[:ITEMS].numpy().copy(), **dense}


def set_weights(model: Recommender, weights: Arrays) -> None:
    """Writes weights into the shards of this rank."""
    for shard in model.rows.layout.on(model.comm.rank):
        values = torch.from_numpy(weights[shard.table][shard.row : shard.row + shard.rows])
        model.rows.local_rows[shard.base : shard.base + shard.rows].copy_(values)
    dense = {name: torch.from_numpy(value) for name, value in weights.items() if name not in ("user", "item")}
    model.backbone.load_state_dict(dense)


def whole(results: Sequence[Result], name: str) -> np.ndarray:
    """Sharded state of all ranks as one array by user, which must not overlap nor miss anyone."""
    parts = [result.sharded[name] for result in results]
    assert [first for first, _ in parts] == list(np.cumsum([0, *(len(rows) for _, rows in parts[:-1])]))
    joined = np.concatenate([rows for _, rows in parts])
    assert len(joined) == USERS
    return joined
