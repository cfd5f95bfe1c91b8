"""Which trials are stopped early, and that an epoch counts once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from ray.tune.schedulers import TrialScheduler

from invdist.runtime.private_ray import PrivateRay
from invdist.study import tuning
from invdist.study.run import run as run_study
from invdist.study.space import Case
from invdist.study.spec import Stopping, load
from invdist.study.trial import STOPPED, Result, Trial
from invdist.training.history import METRICS_FILE
from tests.study.specs import tiny, written

_CONFIG = "data: {path: x}\n"


def _write_epoch(folder: Path, epoch: int, auc: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    event = {"event": "epoch", "epoch": epoch, "rows": 1, "seconds": 1.0, "valid": {"auc": auc}, "directions": {}}
    with (folder / METRICS_FILE).open("a") as file:
        file.write(json.dumps(event) + "\n")


class _Running:
    """Trials as Tune shows them to its scheduler, each with one metric all the way."""

    def __init__(self, folder: Path, stopping: Stopping) -> None:
        self.folder, self.scheduler = folder, tuning.FairStopping(30, stopping)

    def add(self, case: str, name: str) -> Any:
        payload = {"case": f"feed/{case}", "folder": str(self.folder / name), "config": _CONFIG, "ranks": 1}
        trial = SimpleNamespace(trial_id=name, config={"trial": payload})
        self.scheduler.on_trial_add(None, trial)
        return trial

    def epoch(self, trial: Any, epoch: int, value: float) -> bool:
        """Whether the trial is stopped after this epoch."""
        _write_epoch(Path(trial.config["trial"]["folder"]), epoch - 1, value)
        result = {"training_iteration": epoch, tuning.METRIC: value}
        return self.scheduler.on_trial_result(None, trial, result) == TrialScheduler.STOP


def test_a_trial_is_compared_with_those_of_its_own_case(tmp_path: Path) -> None:
    running = _Running(tmp_path, Stopping(grace_epochs=2, reduction=3))
    good = [running.add("none-gmf", f"good{i}") for i in range(3)]
    bad = [running.add("srns-gmf", f"bad{i}") for i in range(3)]
    # The second case is worse than the first by far, and its best trial comes to its own end all the same.
    stopped = {trial.trial_id: False for trial in (*good, *bad)}
    for epoch in range(1, 8):
        for trial, value in zip((*good, *bad), (0.83, 0.82, 0.81, 0.63, 0.62, 0.61), strict=True):
            if not stopped[trial.trial_id]:
                stopped[trial.trial_id] = running.epoch(trial, epoch, value)
        if epoch == 1:
            assert not any(stopped.values())  # grace
    assert stopped == {"good0": False, "good1": True, "good2": True, "bad0": False, "bad1": True, "bad2": True}
    left = Result.read(tmp_path / "bad2")
    assert left is not None
    assert (left.status, left.epochs, left.best) == (STOPPED, 2, 0.61)


def test_a_trial_is_held_against_those_of_before_an_interruption(tmp_path: Path) -> None:
    stopping = Stopping(grace_epochs=2, reduction=3)
    fresh, resumed = (_Running(tmp_path / name, stopping) for name in ("fresh", "resumed"))
    for number, value in enumerate((0.80, 0.79)):
        folder = tmp_path / f"earlier{number}"
        for epoch in range(4):
            _write_epoch(folder, epoch, value)
        resumed.scheduler.remember(Trial(Case("feed", "none", "gmf"), "tuning", 9, {}, _CONFIG, folder))
    for running, stops in ((fresh, False), (resumed, True)):
        trial = running.add("none-gmf", "late")
        assert not running.epoch(trial, 1, 0.5)
        assert running.epoch(trial, 2, 0.5) is stops


def test_a_repeated_epoch_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial killed between the line of epoch 1 and its checkpoint repeats that epoch."""
    folder, told = tmp_path / "trial", []
    for epoch, value in enumerate((0.6, 0.7)):
        _write_epoch(folder, epoch, value)

    def train(text: str, run: Path, keep: bool, on_epoch: Any, cuda: bool) -> None:
        for epoch, value in ((1, 0.7), (2, 0.8)):
            _write_epoch(run, epoch, value)
            on_epoch()

    monkeypatch.setattr(tuning.trials_module, "run", train)
    monkeypatch.setattr(tuning.tune, "report", lambda result: told.append(result[tuning.METRIC]))
    payload = {"folder": str(folder), "config": _CONFIG, "ranks": 1, "keep": False, "cuda": False}
    tuning._train({"trial": payload})
    assert told == [0.6, 0.7, 0.8]


@pytest.mark.slow
def test_a_study_survives_processes_that_die(
    tmp_path: Path, ray_cluster: PrivateRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`none` dies once and is started again; `means` dies every time and is listed as failed."""
    train, deaths = tuning._train, tmp_path / "deaths"

    def dies(config: dict[str, Any]) -> None:
        if "means" in config["trial"]["case"] or not deaths.exists():
            with deaths.open("a") as file:
                file.write(config["trial"]["case"] + "\n")
            os._exit(1)
        train(config)

    monkeypatch.setattr(tuning, "_train", dies)
    study = load(written(tiny(tmp_path, strategies=["none"], seeds=[0], trials=1, concurrent=1), tmp_path))
    results = run_study(study, say=lambda line: None)
    rows = {row["strategy"]: row for row in pq.read_table(study.path / "results.parquet").to_pylist()}
    assert {name: row["status"] for name, row in rows.items()} == {"none": "finished", "means": "failed"}
    assert rows["none"]["test_auc"] is not None
    assert deaths.read_text().split() == ["feed/none-gmf", *["feed/means"] * 3]
    assert "died" in results.read_text().split("Trials that failed")[1]
