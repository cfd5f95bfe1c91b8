"""The training loop on real gloo ranks: the same run at any number of ranks, ragged ends, stop and exact resume."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from invdist import config as configs
from invdist.cli import prepare
from invdist.runtime.errors import UserError
from invdist.runtime.process import single_rank
from invdist.training import trainer as loop
from invdist.training.run_folder import STOP_FILE
from invdist.training.trainer import Trainer
from tests.distributed import run_ranks

# 3,600 labeled rows by 97 a step do not divide by 1, 2 or 3 ranks, and the last step has fewer rows than ranks * k.
_SETTINGS = {
    "data": {"batch_size": 97, "readers": 0},
    "unlabeled": {"rate": 2},
    "rows": {"dim": 8, "sharding": "row_wise"},
    "training": {"epochs": 2, "patience": 5, "log_every": 1},
    "optimizer": {"gamma": 0.01},
    "ig": {"alpha_ratio": 1.0},
}


def _trainer(data: str, run: Path, **changes: Any) -> Trainer:
    overrides = [f"data.path={data}", *(f"{key.replace('__', '.')}={value}" for key, value in changes.items())]
    return Trainer(configs.from_mapping(_SETTINGS, overrides), run, device=torch.device("cpu"))


def _weights(trainer: Trainer) -> np.ndarray:
    """All rows of both tables and the dense weights as one vector, the same at any number of ranks."""
    rows = trainer.model.rows
    layout, parts = rows.layout, []
    for table in layout.tables:
        whole = torch.zeros(table.rows, table.columns)
        for shard in layout.on(trainer.comm.rank):
            if shard.table == table.name:
                part = rows.local_rows[shard.base : shard.base + shard.rows]
                whole[shard.row : shard.row + shard.rows, shard.column : shard.column + shard.columns] = part
        parts.append(trainer.comm.all_reduce(whole).wait().reshape(-1))
    return torch.cat([*parts, *(p.detach().reshape(-1) for p in trainer.model.backbone.parameters())]).numpy()


def _train(rank: int, world_size: int, data: str, run: str, changes: dict[str, Any]) -> dict[str, Any]:
    trainer = _trainer(data, Path(run), **changes)
    steps = {phase.name: stream.steps for phase, stream in zip(trainer.phases, trainer.streams, strict=True)}
    final = trainer.fit()
    return {"final": final, "weights": _weights(trainer), "steps": steps}


def _events(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def test_one_two_and_three_ranks_train_the_same_model(tiny_data: Path, tmp_path: Path) -> None:
    results, directions = [], []
    for world_size in (1, 2, 3):
        run = tmp_path / str(world_size)
        ranks = run_ranks(_train, world_size, str(tiny_data), str(run), {})
        for rank in ranks[1:]:
            assert rank["final"]["test"] == ranks[0]["final"]["test"]
        results.append(ranks[0])
        directions.append([event["direction"] for event in _events(run, "step") if "direction" in event])
        epochs = _events(run, "epoch")
        # No row is lost at a ragged end: 3,240 training-train rows and 360 training-test rows, every epoch.
        assert [epoch["rows"] for epoch in epochs] == [3600, 3600]
        assert sum(epochs[0]["directions"].values()) == ranks[0]["steps"]["phase2"] == -(-360 // 97)
    for other in results[1:]:
        np.testing.assert_allclose(other["weights"], results[0]["weights"], atol=1e-5)
        assert other["final"]["test"]["auc"] == pytest.approx(results[0]["final"]["test"]["auc"], abs=1e-4)
    assert directions[0] == directions[1] == directions[2]


def test_turns_spread_phase_2_and_leave_nothing_out(tiny_data: Path, tmp_path: Path) -> None:
    run_ranks(_train, 2, str(tiny_data), str(tmp_path), {"ig__turns": 3, "training__epochs": 1})
    steps = [(event["phase"], event["step"]) for event in _events(tmp_path, "step")]
    # 34 steps of phase 1 and 4 of phase 2, each third of one followed by the same third of the other.
    runs = [[step for _, step in run] for _, run in itertools.groupby(steps, key=lambda pair: pair[0])]
    ends = [(1, 11), (1, 1), (12, 22), (2, 2), (23, 34), (3, 4)]
    assert runs == [list(range(first, last + 1)) for first, last in ends]
    assert [epoch["rows"] for epoch in _events(tmp_path, "epoch")] == [3600]
    assert _events(tmp_path, "start")[0]["rows_per_epoch"] == pytest.approx(3600, abs=3)


def _saved_steps(rank: int, world_size: int, data: str, run: str) -> list[int]:
    """The steps that are saved if each look at the clock of the first rank is 10 s later, and others have none."""
    changes = {"checkpoint__every_seconds": 15, "training__epochs": 1, "training__test": False}
    trainer, saved = _trainer(data, Path(run), **changes), []
    clock = itertools.count(10, 10) if rank == 0 else itertools.repeat(0)
    save = trainer.store.save

    def noted(model: Any, strategy: Any, position: Any, *rest: Any) -> None:
        saved.append(position.global_step)
        save(model, strategy, position, *rest)

    trainer._saved_at = 0.0
    fake = SimpleNamespace(monotonic=clock.__next__, perf_counter=time.perf_counter)
    with mock.patch.object(loop, "time", fake), mock.patch.object(trainer.store, "save", noted):
        trainer.fit()
    return saved


def test_checkpoints_by_time_are_decided_by_the_first_rank(tiny_data: Path, tmp_path: Path) -> None:
    first, second = run_ranks(_saved_steps, 2, str(tiny_data), str(tmp_path))
    assert first == second == [32, 38]  # looked at after 16 and 32 of 38 steps; the last is the end of the epoch


def _interrupted(rank: int, world_size: int, data: str, run: str, changes: dict[str, Any], stop_after: int) -> Any:
    loop._CONTROL_STEPS = 1
    trainer = _trainer(data, Path(run), **changes)
    count = itertools.count(1)
    step = trainer._step

    def counted(*args: Any) -> Any:
        if next(count) == stop_after and rank == 0:
            (Path(run) / STOP_FILE).touch()
        return step(*args)

    with mock.patch.object(trainer, "_step", counted):
        return trainer.fit()


@pytest.mark.parametrize(
    ("changes", "stop_after"),
    [
        ({"method": "ig", "ig__phase2_passes": 2}, 36),
        ({"method": "ig", "ig__phase2_passes": 2, "ig__turns": 3}, 25),
        ({"method": "none", "model": "neumf", "tower__dropout": 0.3}, 11),
    ],
    ids=["ig in the second pass of phase 2", "ig in phase 2 of the second turn", "neumf with dropout"],
)
def test_a_stopped_run_resumes_to_identical_weights(
    tiny_data: Path, tmp_path: Path, changes: dict[str, Any], stop_after: int
) -> None:
    whole = run_ranks(_train, 2, str(tiny_data), str(tmp_path / "whole"), changes)
    run = tmp_path / "stopped"
    stopped = run_ranks(_interrupted, 2, str(tiny_data), str(run), changes, stop_after)
    assert stopped[0] == {"stopped": True, "global_step": stop_after}
    (run / STOP_FILE).unlink()
    resumed = run_ranks(_train, 2, str(tiny_data), str(run), changes)
    np.testing.assert_array_equal(resumed[0]["weights"], whole[0]["weights"])
    assert resumed[0]["final"]["test"] == whole[0]["final"]["test"]
    assert resumed[0]["final"]["directions"] == whole[0]["final"]["directions"]
    # Every row of the interrupted epoch was seen once: its account, resumed, is that of the whole run.
    assert [e["rows"] for e in _events(run, "epoch")] == [e["rows"] for e in _events(tmp_path / "whole", "epoch")]


def test_a_run_resumes_at_another_number_of_ranks(tiny_data: Path, tmp_path: Path) -> None:
    whole = run_ranks(_train, 1, str(tiny_data), str(tmp_path / "whole"), {})
    run = tmp_path / "stopped"
    run_ranks(_interrupted, 3, str(tiny_data), str(run), {}, 50)
    (run / STOP_FILE).unlink()
    resumed = run_ranks(_train, 2, str(tiny_data), str(run), {})
    np.testing.assert_allclose(resumed[0]["weights"], whole[0]["weights"], atol=1e-5)


def _diverge(rank: int, world_size: int, data: str, run: str) -> str:
    trainer = _trainer(data, Path(run), checkpoint__every_steps=10)
    step = trainer._step

    def poisoned(phase: Any, batch: Any, exchange: Any) -> Any:
        if phase.name == "phase2":
            batch.label.fill_(float("nan"))
        return step(phase, batch, exchange)

    with mock.patch.object(trainer, "_step", poisoned), pytest.raises(loop.TrainingDiverged) as error:
        trainer.fit()
    return str(error.value)


def test_divergence_says_where_and_keeps_the_last_checkpoint(tiny_data: Path, tmp_path: Path) -> None:
    message = run_ranks(_diverge, 1, str(tiny_data), str(tmp_path / "run"))[0]
    assert "step 34 (epoch 0, phase2)" in message
    assert "not finite at any candidate" in message
    assert "step-" in message
    assert list((tmp_path / "run" / "checkpoints").glob("step-*/manifest.json"))


def _resume(rank: int, world_size: int, data: str, run: str, changes: dict[str, Any]) -> str:
    trainer = _trainer(data, Path(run), **changes)
    with pytest.raises(UserError) as error:
        trainer._restore()
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data__batch_size": 50}, "step 25 of an epoch with data.batch_size=97"),
        ({"seed": 7}, "seed=0"),
        ({"unlabeled__rate": 3}, "unlabeled.rate=2"),
        ({"ig__turns": 2}, "ig.turns=1"),
        ({"training__metric": "gauc"}, "training.metric=auc"),
    ],
)
def test_what_tells_where_a_half_done_epoch_is_cannot_change(
    half_done: Path, tiny_data: Path, changes: dict[str, Any], said: str
) -> None:
    assert said in run_ranks(_resume, 1, str(tiny_data), str(half_done), changes)[0]


def test_other_settings_may_change_and_a_damaged_checkpoint_is_done_without(
    half_done: Path, tiny_data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(half_done, run)
    saved = sorted((run / "checkpoints").iterdir())
    assert [folder.name for folder in saved] == ["step-000000020", "step-000000025"]
    for file in saved[-1].glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-8])
    changes = {"training__epochs": 1, "optimizer__gamma": 0.02}
    run_ranks(_train, 1, str(tiny_data), str(run), changes)
    assert "step 25 is damaged: going on from step 20" in _events(run, "warning")[0]["message"]
    assert _events(run, "resume")[-1]["global_step"] == 20
    for folder in (run / "checkpoints").glob("step-*"):
        for file in folder.glob("*.safetensors"):
            file.write_bytes(b"")
    (run / "metrics.jsonl").unlink()
    assert "step-" in run_ranks(_resume, 1, str(tiny_data), str(run), {})[0]  # none is whole: not begun anew


@pytest.fixture(scope="module")
def half_done(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped in its first epoch, with two checkpoints."""
    run = tmp_path_factory.mktemp("half") / "run"
    run_ranks(_interrupted, 1, str(tiny_data), str(run), {"checkpoint__every_steps": 20}, 25)
    (run / STOP_FILE).unlink()
    return run


def test_a_metric_that_the_validation_rows_cannot_give_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """One validation row a user, as after leave-one-out: no user has both classes, and GAUC is not defined."""
    rng = np.random.default_rng(0)
    rows = [(user, item, int(rng.integers(1, 6))) for user in range(40) for item in rng.permutation(60)[:20]]
    (tmp_path / "log.csv").write_text("user,item,rating\n" + "".join(f"{u},{i},{r}\n" for u, i, r in rows))
    for name, at in (("valid", 0), ("test", 1)):
        held_out = [rows[user * 20 + at] for user in range(40)]
        (tmp_path / f"{name}.csv").write_text("".join(f"{u},{i},{r}\n" for u, i, r in held_out))
    given = ["split=given", *(f"{name}_file={tmp_path / name}.csv" for name in ("valid", "test"))]
    data = str(tmp_path / "data")
    assert prepare.main(["ratings", "--input", str(tmp_path / "log.csv"), "--output", data, *given]) == 0
    with single_rank():
        with pytest.raises(UserError, match=r"training.metric: gauc is not defined .* use training.metric=auc"):
            _trainer(data, tmp_path / "gauc", method="none", training__metric="gauc").fit()
        assert _trainer(data, tmp_path / "auc", method="none").fit()["valid"]["auc"] > 0
