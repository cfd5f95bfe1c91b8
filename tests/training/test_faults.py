"""Workers, drivers and nodes that die, hang or are interrupted: the run ends in the model it would have had anyway."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle
import pytest

from invdist import config as configs
from invdist.data.dataset import Dataset
from invdist.training import ray_backend, run_folder
from invdist.training.compare import rows_seen, same_weights

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not find the tests

_SETTINGS = {
    "data": {"batch_size": 256, "readers": 1},
    "unlabeled": {"rate": 2},
    "rows": {"dim": 8, "sharding": "row_wise"},
    "optimizer": {"gamma": 0.01},
    "training": {"epochs": 3, "patience": 9, "log_every": 1},
    "checkpoint": {"every_steps": 4},
    "ray": {"workers": 2, "device": "cpu", "max_failures": 5, "timeout_s": 60},
}
_ROWS = 3600


def _config(data: Path, folder: Path, name: str, *overrides: str) -> configs.Config:
    return configs.from_mapping(_SETTINGS, [f"data.path={data}", f"runs={folder}", f"name={name}", *overrides])


def _run(data: Path, folder: Path, name: str, *overrides: str, worker: Any = None) -> Path:
    config = _config(data, folder, name, *overrides)
    run = run_folder.create(config, Dataset.open(str(data)))
    ray_backend.fit(config, run, worker)
    return Path(str(run))


@pytest.fixture(scope="module")
def undisturbed(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory, ray_cluster: object) -> Path:
    """A run that nothing happened to."""
    return _run(tiny_data, tmp_path_factory.mktemp("runs"), "undisturbed")


def _events(run: Path, kind: str) -> list[dict[str, Any]]:
    events = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [event for event in events if event["event"] == kind]


def _once(run: Path, name: str) -> bool:
    """True for the first process that asks for `name` in this run."""
    try:
        (run / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _worker_killed_three_times(settings: dict[str, str]) -> None:
    """Kills rank 1 in phase 1; then between candidate evaluation and commit; then while a checkpoint is written."""
    from ray.train import get_context

    from invdist.models.recommender import Recommender
    from invdist.training.checkpoint import store
    from invdist.training.trainer import Trainer

    run = Path(settings["run"])
    step, add, write = Trainer._step, Recommender.add, store.CheckpointStore._write_mine

    def die(name: str) -> None:
        if _once(run, name):
            os.kill(os.getpid(), signal.SIGKILL)

    def dying_step(self: Any, phase: Any, *args: Any) -> Any:
        if phase.name == "phase1" and self.position.global_step == 7:
            die("killed in phase 1")
        return step(self, phase, *args)

    def dying_add(self: Any, *args: Any) -> Any:
        if (run / "killed in phase 1").exists():
            die("killed between evaluation and commit")
        return add(self, *args)

    def dying_write(self: Any, target: Any, written: Any) -> Any:
        if (run / "killed between evaluation and commit").exists():
            die("killed while writing")
        return write(self, target, written)

    if get_context().get_world_rank() == 1:
        mock.patch.object(Trainer, "_step", dying_step).start()
        mock.patch.object(Recommender, "add", dying_add).start()
        mock.patch.object(store.CheckpointStore, "_write_mine", dying_write).start()
    ray_backend.train_worker(settings)


@pytest.mark.slow
def test_a_worker_killed_anywhere_leaves_no_trace_in_the_model(
    tiny_data: Path, tmp_path: Path, undisturbed: Path
) -> None:
    run = _run(tiny_data, tmp_path, "killed", worker=_worker_killed_three_times)
    for name in ("killed in phase 1", "killed between evaluation and commit", "killed while writing"):
        assert (run / name).exists()
    assert len(_events(run, "start")) == 4
    assert same_weights(run, undisturbed)
    assert rows_seen(run, _ROWS) == {"lost_rows": 0, "doubled_rows": 0}
    (final,), (expected,) = _events(run, "final"), _events(undisturbed, "final")
    assert (final["test"], final["directions"]) == (expected["test"], expected["directions"])


def _worker_that_hangs_once(settings: dict[str, str]) -> None:
    from ray.train import get_context

    from invdist.training.trainer import Trainer

    run, step = Path(settings["run"]), Trainer._step

    def hanging_step(self: Any, *args: Any) -> Any:
        if self.position.global_step == 9 and _once(run, "hung"):
            os.kill(os.getpid(), signal.SIGSTOP)
        return step(self, *args)

    if get_context().get_world_rank() == 1:
        mock.patch.object(Trainer, "_step", hanging_step).start()
    ray_backend.train_worker(settings)


@pytest.mark.slow
def test_a_rank_that_hangs_is_noticed_and_replaced(tiny_data: Path, tmp_path: Path, undisturbed: Path) -> None:
    run = _run(tiny_data, tmp_path, "hung", "ray.timeout_s=5", worker=_worker_that_hangs_once)
    assert (run / "hung").exists()
    assert len(_events(run, "start")) == 2
    assert same_weights(run, undisturbed)


@pytest.mark.slow
def test_a_killed_driver_is_resumed_by_command(tiny_data: Path, tmp_path: Path, undisturbed: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(configs.dump(_config(tiny_data, tmp_path, "driver")))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    command = [sys.executable, "-m", "invdist.train"]
    driver = subprocess.Popen([*command, "--config", str(config)], env=environment, stdout=subprocess.DEVNULL)
    run = tmp_path / "driver"
    try:
        deadline = time.monotonic() + 120
        while not list(run.glob("checkpoints/step-*/manifest.json")):
            assert driver.poll() is None, "the driver ended before it was killed"
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        driver.kill()
        driver.wait()
    assert not _events(run, "final")
    resumed = subprocess.run(
        [*command, "--resume", str(run)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "continuing from" in resumed.stdout
    assert same_weights(run, undisturbed)


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(tiny_data: Path, tmp_path: Path, undisturbed: Path) -> None:
    """Ray Train has a handler of its own for it, which would end the workers at once."""
    config = tmp_path / "config.yaml"
    config.write_text(configs.dump(_config(tiny_data, tmp_path, "stopped", "checkpoint.every_steps=0")))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    command = [sys.executable, "-m", "invdist.train"]
    driver = subprocess.Popen([*command, "--config", str(config)], env=environment, stdout=subprocess.PIPE, text=True)
    run = tmp_path / "stopped"
    try:
        deadline = time.monotonic() + 120
        # Steps reach the file up to a second late, and the whole run takes little more.
        while not (run / "metrics.jsonl").is_file() or not _events(run, "start"):
            assert driver.poll() is None, "the driver ended before it was stopped"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        driver.send_signal(signal.SIGINT)
        said, _ = driver.communicate(timeout=120)
    finally:
        driver.kill()
    assert driver.returncode == 130, said
    (stopped,) = _events(run, "stopped")
    assert 0 < stopped["global_step"] < 45
    assert f"continue with: python -m invdist.train --resume {run}" in said
    resumed = subprocess.run([*command, "--resume", str(run)], env=environment, capture_output=True, check=False)
    assert resumed.returncode == 0, resumed.stderr
    assert same_weights(run, undisturbed)


@pytest.mark.slow
def test_a_lost_node_is_done_without(tiny_data: Path, tmp_path: Path, repository: Path) -> None:
    config = _config(tiny_data, tmp_path, "node", "ray.min_workers=1", "training.epochs=30", "data.readers=2")
    (tmp_path / "config.yaml").write_text(configs.dump(config))
    script = repository / "tests" / "training" / "node_loss.py"
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    ended = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "config.yaml")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    run = tmp_path / "node"
    assert (run / "node removed").exists()
    assert [event["world_size"] for event in _events(run, "start")] == [2, 1]
    assert rows_seen(run, _ROWS) == {"lost_rows": 0, "doubled_rows": 0}
    assert _events(run, "final")
