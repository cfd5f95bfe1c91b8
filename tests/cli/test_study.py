"""A study end to end: tuned, selected, tested, killed and continued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from invdist.cli import study as command
from invdist.runtime.errors import UserError
from invdist.runtime.files import exclusive
from invdist.runtime.private_ray import PrivateRay
from invdist.serving.run import open_run
from invdist.study import run as running
from invdist.study.spec import load
from invdist.training.history import History
from tests.study.specs import tiny, written


def _results(folder: Path) -> dict[Path, dict]:
    return {path.parent: json.loads(path.read_text()) for path in folder.glob("studies/tiny/trials/*/*/*/trial.json")}


def test_a_study_from_the_spec_to_the_table(tmp_path: Path, ray_cluster: PrivateRay):
    mapping = tiny(tmp_path, strategies=["none", "ig", "srns"])
    # A memory of one candidate cannot give four negatives: such settings are left out. Steps of 1e38 are found out by
    # taking them.
    choices = {"optimizer.gamma": [0.01, 1e38], "srns.memory": [1, 16], "unlabeled.rate": [4]}
    mapping["space"].append({"strategies": ["srns"], "choices": choices})
    mapping["start"] = [{"strategies": ["srns"], "settings": {"srns.memory": 1}}]
    study = load(written(mapping, tmp_path))
    lines: list[str] = []
    path = running.run(study, command="the command", say=lines.append)

    text = path.read_text()
    assert "`the command`" in text
    assert "minutes by the clock, in all sessions, up to 2 at a time." in text
    assert all(f"| {name} | " in text for name in ("none", "ig", "srns", "means"))
    assert "paired t-test over 2 seeds" in text

    # The failed trial is listed, and its strategy continues with the other setting.
    left_out, failed = text.split("Settings that were left out")[1].split("Trials that failed")
    assert "srns.memory: 1 candidates of a user cannot give unlabeled.rate=4" in left_out
    assert any("srns-gmf seed" in line and "failed: " in line for line in lines)
    assert "srns on gmf" in failed
    assert "2, 1 failed" in text
    assert "`srns.memory=16`" in text

    table = pq.read_table(study.path / "results.parquet").to_pylist()
    tuning = [row for row in table if row["role"] == "tuning"]
    tested = [row for row in table if row["role"] == "seed"]
    assert sorted((row["strategy"], row["seed"]) for row in tested) == [
        (name, seed) for name in ("ig", "means", "none", "srns") for seed in (0, 1)
    ]
    assert len(tuning) == 6  # means has nothing to choose here

    # Test rows were touched by the selected settings alone, and those are the best on validation.
    assert all(row["test_auc"] is None for row in tuning)
    assert all(row["test_auc"] is not None for row in tested)
    for run in (study.path / row["run"] for row in tuning if row["status"] != "failed"):
        final = History.read(run).final
        assert final is None or final["test"] is None
    for name in ("none", "ig"):
        mine = [row for row in tuning if row["strategy"] == name]
        best = max(mine, key=lambda row: row["valid_auc"] or 0)
        assert {row["setting"] for row in tested if row["strategy"] == name} == {best["setting"]}

    assert all((study.path / row["run"] / "metrics.jsonl").is_file() for row in table if row["status"] != "failed")
    assert (study.path / "figures" / "feed-metrics.html").is_file()
    assert (study.path / "figures" / "feed-directions.html").is_file()
    assert sum("seed 0" in line for line in lines) == 4


def test_all_trials_share_one_set_of_exposure_vectors(tmp_path: Path, ray_cluster: PrivateRay) -> None:
    mapping = tiny(tmp_path, strategies=["none"], seeds=[0])
    mapping["base"] |= {"exposures": {"vectors": True, "learned": 16, "dim": 8}}
    study = load(written(mapping, tmp_path))
    running.run(study, say=lambda line: None)
    runs = [path for path, result in _results(tmp_path).items() if result["status"] == "finished"]
    assert len(runs) == 4  # two of tuning, at the same time; the selected one; the means
    products = [event["product"] for run in runs for event in History.read(run).of("vectors")]
    assert products == list(range(1, 15))
    assert len(list((tmp_path / "cache" / "exposure-vectors").iterdir())) == 1
    scored = [run for run in runs if "none" in run.parent.name and run.name.startswith("seed")]
    assert open_run(scored[0]).config.exposures.vectors


@pytest.mark.slow
def test_a_killed_study_continues_without_repeating_what_is_done(tmp_path: Path, ray_cluster: PrivateRay):
    mapping = tiny(tmp_path, concurrent=1)
    path = written(mapping, tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "invdist", "study", "--config", str(path)],
        env={**os.environ, "RAY_ADDRESS": ray_cluster.address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    deadline = time.monotonic() + 90
    while len(_results(tmp_path)) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    output = process.communicate()[0].decode()
    done = {folder: (folder / "trial.json").stat().st_mtime_ns for folder in _results(tmp_path)}
    assert 2 <= len(done) < 9, output

    lines: list[str] = []
    study = load(path)
    running.run(study, resume=True, say=lines.append)
    assert {folder: (folder / "trial.json").stat().st_mtime_ns for folder in done} == done
    assert len(_results(tmp_path)) == 10
    assert any("done before" in line for line in lines)


@pytest.mark.slow
def test_trials_over_two_ranks_give_the_table_of_one(tmp_path: Path, ray_cluster: PrivateRay):
    """A run is the same at any number of workers, so a study over ranks can be compared with one without."""
    found = {}
    for ranks in (1, 2):
        ray = {"workers": ranks, "device": "cpu"}
        # Long enough that a group can be asked to end while it trains.
        base = {"training": {"epochs": 12, "patience": 12}, "ray": ray, "data": {"batch_size": 256}}
        choices = [{"choices": {"optimizer.gamma": [0.01, 0.0001]}}]
        options = {"strategies": ["ig"], "seeds": [0], "space": choices, "concurrent": 1}
        stopping = {"grace_epochs": 1, "reduction": 2}
        study = load(written(tiny(tmp_path, name=f"ranks-{ranks}", base=base, stopping=stopping, **options), tmp_path))
        running.run(study)
        rows = pq.read_table(study.path / "results.parquet").to_pylist()
        assert [row["role"] for row in rows] == ["tuning", "tuning", "seed", "seed"]
        starts = [History.read(study.path / row["run"]).start for row in rows]
        assert [start["world_size"] for start in starts] == [ranks, ranks, ranks, 1]
        # The second setting hardly moves: ASHA compares it with the first and ends it, wherever its ranks run.
        assert [row["status"] for row in rows] == ["finished", "stopped early", "finished", "finished"]
        assert rows[1]["epochs"] < 12
        # How far the second got before it was told is a matter of time; all else is not.
        found[ranks] = [rows[at]["valid_auc"] for at in (0, 2, 3)]
        assert rows[2]["test_auc"] is not None
    assert found[1] == pytest.approx(found[2], abs=1e-4)


def test_a_study_that_exists_is_not_overwritten_and_own_typing_errors_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = written(tiny(tmp_path), tmp_path)
    (tmp_path / "studies" / "tiny").mkdir(parents=True)
    assert command.main(["--config", str(path)]) == 2
    assert "--resume" in capsys.readouterr().err
    assert command.main(["--config", str(path), "base.optimizer.gama=1", "name=other"]) == 2
    assert "optimizer.gama" in capsys.readouterr().err
    assert command.main(["--config", str(path), "--plan"]) == 0
    assert "ig-gmf: 2 tuning trials, then 2 seeds" in capsys.readouterr().out


def test_a_study_that_runs_is_left_alone(tmp_path: Path):
    study = load(written(tiny(tmp_path), tmp_path))
    study.path.mkdir(parents=True)
    with exclusive(study.path), pytest.raises(UserError, match="in use by another process"):
        running.run(study, resume=True)
    assert not (study.path / "results.md").exists()
