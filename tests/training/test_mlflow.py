"""The MLflow logger against a real local store (sqlite)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from invdist import config as configs
from invdist.config import Config
from invdist.runtime.errors import UserError
from invdist.training.mlflow import RUN_FILE, Mlflow, open_client
from tests.report.generated import ig_events

pytest.importorskip("mlflow")


def _config(uri: str) -> Config:
    return configs.from_mapping({}, ["data.path=/nowhere", f"watch.mlflow={uri}", "watch.mlflow_experiment=tests"])


def _log(config: Config, run: Path, events: list[dict[str, Any]], start: float = 1000.0) -> None:
    logger = Mlflow(config, run)
    for number, event in enumerate(events):
        logger.write({**event, "time": start + 2 * number})  # two seconds apart: no step is left out
    logger.close()


def test_a_run_and_its_continuation_are_one_run_of_mlflow(tmp_path: Path) -> None:
    config = _config(f"sqlite:///{tmp_path}/mlflow.db")
    events = ig_events(epochs=2, train_steps=3, test_steps=5)
    half = next(n for n, event in enumerate(events) if event["event"] == "epoch") + 1
    _log(config, tmp_path, events[:half])
    client = open_client(config)
    run_id = json.loads((tmp_path / RUN_FILE).read_text())["run_id"]
    assert client.get_run(run_id).info.status == "KILLED"
    _log(config, tmp_path, [{"event": "resume", "global_step": 8}, *events[half:]], 2000.0)

    experiment = client.get_experiment_by_name("tests")
    runs = client.search_runs([experiment.experiment_id])
    assert [run.info.run_id for run in runs] == [run_id]
    run = client.get_run(run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", tmp_path.name)
    assert run.data.params["optimizer.gamma"] == "0.001"
    assert run.data.params["data.path"] == "/nowhere"
    steps = [event for event in events if event["event"] == "step"]
    logged = client.get_metric_history(run_id, "step/loss")
    assert [(m.step, m.value) for m in logged] == [(event["global_step"], event["loss"]) for event in steps]
    directions = [event["direction"] for event in steps if event.get("direction") is not None]
    assert [m.value for m in client.get_metric_history(run_id, "step/direction")] == directions
    epochs = [event for event in events if event["event"] == "epoch"]
    assert [m.value for m in client.get_metric_history(run_id, "valid/auc")] == [e["valid"]["auc"] for e in epochs]
    final = next(event for event in events if event["event"] == "final")
    assert run.data.metrics["final_test/auc"] == final["test"]["auc"]


def test_steps_of_one_second_are_one_step_of_mlflow(tmp_path: Path) -> None:
    config = _config(f"sqlite:///{tmp_path}/mlflow.db")
    logger = Mlflow(config, tmp_path)
    for number in range(100):
        logger.write({"event": "step", "time": 10 + number / 50, "global_step": number, "loss": 1.0})
    logger.close()
    run_id = json.loads((tmp_path / RUN_FILE).read_text())["run_id"]
    assert len(open_client(config).get_metric_history(run_id, "step/loss")) == 2


def test_a_store_that_fails_does_not_stop_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise ConnectionError("nobody answers")

    monkeypatch.setattr("invdist.training.mlflow.open_client", lambda config: Gone())
    _log(_config("http://127.0.0.1:9"), tmp_path, ig_events(epochs=1, train_steps=2, test_steps=2))
    assert caplog.text.count("nobody answers") == 1
    assert "lacks" in caplog.text


def test_a_wrong_address_is_a_sentence() -> None:
    with pytest.raises(UserError, match=r"watch\.mlflow"):
        open_client(_config("nonsense://x"))
