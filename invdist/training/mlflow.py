"""Logs a run to MLflow: settings as parameters, losses and metrics by step, final figures. An optional extra.

A thread of its own talks to MLflow, which may be slow or gone: training neither waits for it nor fails with it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
import time
from typing import Any

from invdist.config import Config
from invdist.config.plain_yaml import dotted
from invdist.runtime.errors import UserError
from invdist.runtime.files import write_atomically
from invdist.runtime.paths import AnyPath
from invdist.training.history import Event
from invdist.training.ray_metrics import numbers

RUN_FILE = "mlflow.json"
"""In the run folder: which MLflow run it is, so that a resumed run goes on in the same."""

_STEP_SECONDS = 1.0  # between two steps that are logged: every metric of every step is a row of a table
_WAITING = 1000
_log = logging.getLogger(__name__)


class Mlflow:
    """Takes the events of a run and logs them to the MLflow that `watch.mlflow` names."""

    def __init__(self, config: Config, run: AnyPath) -> None:
        client = open_client(config)
        self._queue: queue.Queue[Event | None] = queue.Queue(_WAITING)
        self._next_step = 0.0
        self._lost = 0
        self._thread = threading.Thread(target=self._follow, args=(client, config, run), name="mlflow", daemon=True)
        self._thread.start()

    def write(self, event: Event) -> None:
        """Takes one event; a step that comes within a second of another one is left out."""
        if event["event"] == "step":
            if event["time"] < self._next_step:
                return
            self._next_step = event["time"] + _STEP_SECONDS
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Logs what is left, for a minute at most."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=5)
        self._thread.join(60)

    def _follow(self, client: Any, config: Config, run: AnyPath) -> None:
        failed = ""
        run_id: str | None = None
        state = "KILLED"
        while (event := self._queue.get()) is not None:
            try:
                run_id = run_id or _open(client, config, run)
                _write(client, run_id, event)
                state = {"final": "FINISHED", "stopped": "KILLED"}.get(event["event"], state)
            except Exception as error:  # of a server, of a database: nothing that training should end for
                self._lost += 1
                if str(error) != failed:
                    failed = str(error)
                    _log.warning("MLflow %s did not take an event: %s", config.watch.mlflow, failed.splitlines()[0])
        if run_id is not None:
            with contextlib.suppress(Exception):
                client.set_terminated(run_id, state)
        if self._lost:
            _log.warning("MLflow %s lacks %d events of this run", config.watch.mlflow, self._lost)


def open_client(config: Config) -> Any:
    """A client of the MLflow that `watch.mlflow` names; `UserError` if that cannot be."""
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    except ImportError:
        raise UserError("watch.mlflow: MLflow is not installed; pip install 'invdist[mlflow]'") from None
    try:
        return MlflowClient(tracking_uri=config.watch.mlflow)
    except (MlflowException, OSError, ValueError) as error:
        raise UserError(f"watch.mlflow: {str(error).splitlines()[0]}") from None


def _open(client: Any, config: Config, run: AnyPath) -> str:
    """The id of the MLflow run of a run folder, which is made the first time."""
    from invdist import config as configs
    from invdist.config.plain_yaml import parse

    where = {"tracking_uri": config.watch.mlflow, "experiment": config.watch.mlflow_experiment}
    with contextlib.suppress(OSError, ValueError, KeyError):
        saved = json.loads((run / RUN_FILE).read_text())
        if {name: saved.get(name) for name in where} == where:
            client.update_run(saved["run_id"], "RUNNING")
            return saved["run_id"]
    found = client.get_experiment_by_name(config.watch.mlflow_experiment)
    experiment = found.experiment_id if found else client.create_experiment(config.watch.mlflow_experiment)
    run_id = client.create_run(experiment, run_name=run.name, tags={"invdist.run": str(run)}).info.run_id
    write_atomically(run / RUN_FILE, json.dumps({**where, "run_id": run_id}))
    for name, value in dotted(parse(configs.dump(config).encode(), "settings")).items():
        client.log_param(run_id, name, value)
    return run_id


def _write(client: Any, run_id: str, event: Event) -> None:
    from mlflow.entities import Metric

    kind, at, step = event["event"], int(event.get("time", time.time()) * 1000), int(event.get("global_step", 0))
    values: list[tuple[str, float]] = []
    if kind == "start":
        client.log_param(run_id, "dataset", json.dumps(event.get("dataset"))[:500])
    elif kind == "step":
        values = [(f"step/{name}", v) for name, v in numbers(event) if name in ("loss", "rows_per_s", "direction")]
    elif kind == "epoch":
        values = [(f"epoch/{name}", v) for name, v in numbers(event) if name in ("loss", "rows_per_s", "epoch")]
        for group in ("valid", "directions"):
            values += [(f"{group}/{name}", value) for name, value in numbers(event.get(group))]
    elif kind == "final":
        for split in ("valid", "test"):
            values += [(f"final_{split}/{name}", value) for name, value in numbers(event.get(split))]
    elif kind == "warning":
        client.set_tag(run_id, "invdist.warning", str(event.get("message"))[:500])
    if values:
        client.log_batch(run_id, metrics=[Metric(name, value, at, step) for name, value in values])
