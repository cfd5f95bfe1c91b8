"""The warm start: the same rows at any number of ranks, resumed exactly, and only before the first epoch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from invdist import config as configs
from invdist.embeddings.exchange import Pairs
from invdist.learning.warmup import PHASE, _told_apart
from invdist.training.trainer import Trainer
from tests.distributed import run_ranks

# 3,600 labeled rows by 300: 12 steps a pass, 24 of warm start; the checkpoint at 18 is in the middle of it.
_SETTINGS = {
    "method": "ig_warm",
    "data": {"batch_size": 300, "readers": 0},
    "unlabeled": {"rate": 2},
    "rows": {"dim": 4, "sharding": "row_wise"},
    "training": {"epochs": 2, "log_every": 1},
    "optimizer": {"gamma": 0.01},
    "checkpoint": {"every_steps": 18, "keep_last": 9},
    "ig_warm": {"warmup": {"passes": 2, "rate": 4, "scale": 0.5, "start": 0.2}},
}


def _build(data: str, run: Path) -> Trainer:
    return Trainer(configs.from_mapping(_SETTINGS, [f"data.path={data}"]), run, device=torch.device("cpu"))


def _scores(trainer: Trainer) -> np.ndarray:
    user = torch.arange(trainer.dataset.users)
    return trainer.strategy.score(Pairs(user, user % trainer.dataset.items)).numpy()


def _fit(rank: int, world_size: int, data: str, run: str) -> dict[str, Any]:
    trainer = _build(data, Path(run))
    started: dict[str, Any] = {}
    start = trainer.strategy._start  # type: ignore[attr-defined]

    def watched() -> None:
        start()
        rows, k = trainer.model.rows, 4
        for shard in rows.layout.on(rank):
            started[shard.table] = rows.local_rows[shard.base : shard.base + shard.rows, :k].clone().numpy()
        started["output"] = trainer.model.backbone.output.weight.detach().clone().numpy()  # type: ignore[union-attr]

    trainer.strategy._start = watched  # type: ignore[attr-defined]
    trainer.fit()
    return {"scores": _scores(trainer), "started": started}


def test_one_and_two_ranks_agree_and_a_resumed_run_is_the_same(tiny_data: Path, tmp_path: Path) -> None:
    one = run_ranks(_fit, 1, str(tiny_data), str(tmp_path / "one"))[0]
    two = run_ranks(_fit, 2, str(tiny_data), str(tmp_path / "two"))
    np.testing.assert_allclose(two[0]["scores"], one["scores"], atol=2e-5)
    np.testing.assert_array_equal(two[0]["scores"], two[1]["scores"])

    # Where the warm start ends: one vector for all users, items at one scale but not alike, a silent output.
    started = one["started"]
    assert (started["user"] == np.float32(0.2)).all()
    assert np.isclose(np.sqrt((started["item"].astype(float) ** 2).mean()), 0.5, rtol=1e-4)
    assert np.ptp(started["item"], axis=0).min() > 0.1
    assert (started["output"] == 0).all()
    items = np.concatenate([rank["started"]["item"] for rank in two])
    np.testing.assert_allclose(items, started["item"], atol=2e-5)

    # Only before the first epoch, and as many steps as asked for.
    steps = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    warm = [event for event in steps if event["event"] == "step" and event["phase"] == PHASE]
    assert [event["epoch"] for event in warm] == [0] * 24
    assert warm[-1]["loss"] < warm[0]["loss"]

    # Taken up again in the middle of the warm start.
    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "one", resumed)
    for checkpoint in (resumed / "checkpoints").iterdir():
        if "00000018" not in checkpoint.name:
            shutil.rmtree(checkpoint) if checkpoint.is_dir() else checkpoint.unlink()
    assert [path.name for path in (resumed / "checkpoints").glob("step-*")] == ["step-000000018"]
    again = run_ranks(_fit, 1, str(tiny_data), str(resumed))[0]
    np.testing.assert_array_equal(again["scores"], one["scores"])


def test_shuffled_pairs_keep_users_and_the_popularity_of_items() -> None:
    class Rows:
        unlabeled_user = torch.tensor([0, 1, 2, 3, 4, 5])
        unlabeled_item = torch.tensor([10, 11, 12, 13, 14, 15])

    pairs = _told_apart(Rows(), 3)  # type: ignore[arg-type]
    assert pairs.user.tolist() == [0, 1, 2, 3, 4, 5] * 2
    assert pairs.item.tolist() == [10, 11, 12, 13, 14, 15, 12, 10, 11, 15, 13, 14]
