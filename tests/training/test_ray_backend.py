"""A real two-worker Ray Train run with Ray readers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from invdist import config as configs
from invdist import train
from invdist.cli import evaluate
from invdist.data.dataset import Dataset
from invdist.runtime.errors import UserError
from invdist.runtime.files import exclusive
from invdist.training import ray_backend, run_folder
from tests.datasets import digest_of_rows

# Validation log-loss after each of two epochs, as first measured; the order, the samples and the start are functions
# of the seed, so a change that computes nothing new leaves them as they are.
_RECORDED = [0.66732, 0.64737]
_RECORDED_ON = "5f58273e47315924"
"""The rows that they were measured on: others have other losses."""


def _config(data: Path, tmp_path: Path, **changes: Any) -> configs.Config:
    settings = {
        "runs": str(tmp_path),
        "name": "run",
        "data": {"path": str(data), "batch_size": 256, "readers": 1},
        "rows": {"dim": 8},
        "optimizer": {"gamma": 0.01},
        "training": {"epochs": 2, "patience": 5},
        "ray": {"workers": 2, "device": "cpu", "cpus_per_worker": 1, "max_failures": 0},
    }
    return configs.from_mapping(settings, [f"{key.replace('__', '.')}={value}" for key, value in changes.items()])


def _events(run: Path, kind: str) -> list[dict[str, Any]]:
    events = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [event for event in events if event["event"] == kind]


@pytest.mark.usefixtures("ray_cluster")
def test_two_workers_reach_the_recorded_loss(tiny_data: Path, tmp_path: Path) -> None:
    config = _config(tiny_data, tmp_path)
    dataset = Dataset.open(str(tiny_data))
    assert digest_of_rows(dataset) == _RECORDED_ON, "the synthetic data changed: measure the recorded losses again"
    run = Path(str(run_folder.create(config, dataset)))
    ray_backend.fit(config, run)
    (start,) = _events(run, "start")
    assert (start["world_size"], start["backend"]) == (2, "gloo")
    assert [epoch["valid"]["logloss"] for epoch in _events(run, "epoch")] == pytest.approx(_RECORDED, abs=2e-4)
    (final,) = _events(run, "final")
    assert final["test"]["rows"] == Dataset.open(str(tiny_data)).rows["test"]
    assert configs.dump(configs.load(run / "config.yaml")) == configs.dump(config)


@pytest.mark.usefixtures("ray_cluster")
def test_more_workers_than_the_cluster_has_are_refused(tiny_data: Path, tmp_path: Path) -> None:
    config = _config(tiny_data, tmp_path, ray__workers=64)
    with pytest.raises(UserError, match="need 64 CPUs, the Ray cluster has 4"):
        ray_backend.fit(config, tmp_path)


@pytest.mark.usefixtures("ray_cluster")
def test_gpus_are_asked_for_where_they_are(tiny_data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="2 workers need a GPU each, the Ray cluster has 0"):
        ray_backend.cluster_uses_cuda(_config(tiny_data, tmp_path, ray__device="cuda"))
    with pytest.raises(UserError, match="1 workers need a GPU each"):
        ray_backend.cluster_uses_cuda(_config(tiny_data, tmp_path, ray__device="cuda", ray__min_workers=1))
    assert not ray_backend.cluster_uses_cuda(_config(tiny_data, tmp_path, ray__device="auto"))


@pytest.mark.usefixtures("ray_cluster")
def test_a_run_goes_on_elsewhere_and_keeps_what_it_was_given(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints in a folder beside the run, named as seen from here; then the data moves."""
    monkeypatch.chdir(tmp_path)
    data = shutil.copytree(tiny_data, tmp_path / "data")
    config = _config(
        Path("data"), tmp_path, ray__workers=1, data__readers=0, training__epochs=1, checkpoint__path="kept"
    )
    assert train.train(config) == (tmp_path / "run", 0)
    assert list((tmp_path / "kept" / "run").glob("step-*"))
    data.rename(tmp_path / "moved")
    run = str(tmp_path / "run")
    assert train.main(["--resume", run, "training.epochs=2"]) == 2
    assert evaluate.main(["--run", run]) == 2
    assert capsys.readouterr().err.count("if it has moved, add data.path=FOLDER") == 2
    assert train.main(["--resume", run, "training.epochs=2", "data.path=moved"]) == 0
    assert len(_events(Path(run), "epoch")) == 2
    assert evaluate.main(["--run", run]) == 0  # knows the new place by itself


@pytest.mark.usefixtures("ray_cluster")
def test_an_error_only_the_user_can_fix_is_reported_and_not_retried(tiny_data: Path, tmp_path: Path) -> None:
    config = _config(tiny_data, tmp_path, rows__ddr_gb=1e-6, ray__max_failures=3)
    run = run_folder.create(config, Dataset.open(str(tiny_data)))
    entered = tmp_path / "entered"

    def worker(settings: dict[str, str]) -> None:
        from invdist.training import trainer as loop

        build = loop.build_model

        def counted(*args: Any) -> Any:
            with entered.open("a") as file:
                file.write("x")
            return build(*args)

        loop.build_model = counted
        ray_backend.train_worker(settings)

    with pytest.raises(UserError, match=r"do not fit 2 rank\(s\).*rows.ddr_gb"):
        ray_backend.fit(config, run, worker)
    assert entered.read_text() == "xx"  # each of two workers once


def test_checkpoints_of_another_run_are_not_taken_up(tiny_data: Path, tmp_path: Path) -> None:
    config = _config(tiny_data, tmp_path / "runs", checkpoint__path=str(tmp_path / "kept"))
    (tmp_path / "kept" / "run" / "step-000000004").mkdir(parents=True)
    with pytest.raises(UserError, match="holds the checkpoints of another run of this name"):
        run_folder.create(config, Dataset.open(str(tiny_data)))
    assert not (tmp_path / "runs").exists()


def test_a_run_folder_is_not_taken_twice(tiny_data: Path, tmp_path: Path) -> None:
    config, dataset = _config(tiny_data, tmp_path), Dataset.open(str(tiny_data))
    run_folder.create(config, dataset)
    with pytest.raises(UserError, match="exists already: choose another name=, or continue that run with --resume"):
        run_folder.create(config, dataset)


def test_a_run_that_goes_on_is_not_continued_beside_itself(
    tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_folder.create(_config(tiny_data, tmp_path), Dataset.open(str(tiny_data)))
    with exclusive(run):
        assert train.main(["--resume", str(run)]) == 2
    assert f"{run} is in use by another process" in capsys.readouterr().err


def test_an_actor_that_ray_complains_about_does_not_reach_the_terminal() -> None:
    """Ray's core reports restartable actors with arguments in the object store as errors, as Ray Data makes them."""
    program = (
        "import sys\n"
        "from invdist.training.ray_backend import connected\n"
        "class Actor:\n"
        "    def __init__(self, given): self.given = given\n"
        "    def get(self): return self.given\n"
        "with connected(1):\n"
        "    import ray\n"
        "    actor = ray.remote(num_cpus=0, max_restarts=-1)(Actor).remote(ray.put(7))\n"
        "    print(ray.get(actor.get.remote()))\n"
        "    print('said by the program', file=sys.stderr)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr
    assert done.stderr == "said by the program\n"
