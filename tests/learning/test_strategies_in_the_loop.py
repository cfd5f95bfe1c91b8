"""Every strategy through the real stream, loop and checkpoints on two ranks; those with state taken up on one."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from invdist import config as configs
from invdist.config.registry import STRATEGIES
from invdist.embeddings.exchange import Pairs
from invdist.training.trainer import Trainer
from tests.distributed import run_ranks

# 3,600 labeled rows by 150 are 24 steps: a checkpoint in the middle, and one at the end.
_SETTINGS = {
    "data": {"batch_size": 150, "readers": 0},
    "unlabeled": {"rate": 2},
    "rows": {"dim": 4, "sharding": "row_wise"},
    "training": {"epochs": 1},
    "optimizer": {"gamma": 0.01},
    "checkpoint": {"every_steps": 15},
    "t_ce": {"max_drop": 0.4, "ramp_steps": 20},
    "srns": {"memory": 5, "fresh": 4, "ramp_steps": 10},
}
_WITH_STATE = ("t_ce", "srns", "means")


def _fit(rank: int, world_size: int, data: str, runs: str, methods: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    results = {}
    for method in methods:
        settings = configs.from_mapping(_SETTINGS, [f"data.path={data}", f"method={method}"])
        trainer = Trainer(settings, Path(runs) / method, device=torch.device("cpu"))
        final = trainer.fit()
        strategy = trainer.strategy
        user = torch.arange(trainer.dataset.users)
        results[method] = {
            "test": final["test"],
            "scores": strategy.score(Pairs(user, user % trainer.dataset.items)).numpy(),
            "state": {name: value.numpy().copy() for name, value in strategy.state().items()},
            "sharded": {name: value.numpy().copy() for name, (_, value) in strategy.sharded_state().items()},
        }
    return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs on two ranks are."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def two(tiny_data: Path, runs: Path) -> list[dict[str, dict[str, Any]]]:
    """Every registered strategy on two ranks."""
    return run_ranks(_fit, 2, str(tiny_data), str(runs), tuple(STRATEGIES.names()))


def test_every_strategy_trains_on_two_ranks(two: list[dict[str, dict[str, Any]]]) -> None:
    first, second = two
    assert {"none", "ns", "t_ce", "r_ce", "dns", "srns", "idl", "ig", "means"} <= first.keys()
    for method, result in first.items():
        assert result["test"] == second[method]["test"]
        assert math.isfinite(result["test"]["logloss"])
        np.testing.assert_array_equal(result["scores"], second[method]["scores"])
        assert np.ptp(result["scores"]) > 0
    # Saving in the middle of the epoch neither lost nor doubled a row: each counts for its user and its item.
    assert first["means"]["state"]["counts"][:, 0].sum() == 2 * 3600
    # Every user of the tiny data has labeled rows, so every memory is in use.
    assert all((ranks["srns"]["sharded"]["item"][:, 0] >= 0).all() for ranks in two)


def test_strategies_with_state_go_on_at_another_number_of_ranks(
    tiny_data: Path, runs: Path, two: list[dict[str, dict[str, Any]]], tmp_path: Path
) -> None:
    for method in _WITH_STATE:
        saved = sorted((runs / method / "checkpoints").glob("step-*"))
        shutil.copytree(saved[0], tmp_path / method / "checkpoints" / saved[0].name)
        assert saved[0].name.endswith("15")
    one = run_ranks(_fit, 1, str(tiny_data), str(tmp_path), _WITH_STATE)[0]
    for method, result in one.items():
        assert '"event": "resume"' in (tmp_path / method / "metrics.jsonl").read_text()
        whole = two[0][method]
        np.testing.assert_allclose(result["scores"], whole["scores"], atol=1e-4, err_msg=method)
        for name, value in result["state"].items():
            np.testing.assert_array_equal(value, whole["state"][name], err_msg=f"{method} {name}")
    items = np.concatenate([ranks["srns"]["sharded"]["item"] for ranks in two])
    np.testing.assert_array_equal(one["srns"]["sharded"]["item"], items)
