"""The folder of a run: the names of its files, making it, opening it again."""

from __future__ import annotations

import json
import shutil
import time
from typing import Any

from invdist import config as configs
from invdist.config import Config
from invdist.config.plain_yaml import read_yaml
from invdist.data.dataset import Dataset
from invdist.runtime.errors import UserError
from invdist.runtime.files import Folder, write_atomically
from invdist.runtime.paths import AnyPath, StorePath, path_at
from invdist.training.history import METRICS_FILE, read_events

CONFIG_FILE = "config.yaml"
DATASET_FILE = "dataset.json"
FAILED_FILE = "failed.json"
"""Written by a worker that found an error only the user can fix."""
STOP_FILE = "stop"
"""A file of this name asks the run to save and stop."""
_ASK_STORE_S = 5.0


def create(config: Config, dataset: Dataset) -> AnyPath:
    """Makes the folder of a new run, with its settings and a description of its data set."""
    name = config.name or f"{config.method}-{config.model}-{time.strftime('%Y%m%d-%H%M%S')}"
    run = path_at(config.runs) / name
    if config.checkpoint.path is not None and Folder.at(checkpoints(config, run)).folders():
        raise UserError(
            f"checkpoint.path: {checkpoints(config, run)} holds the checkpoints of another run of this name: choose "
            "another name=, or remove them"
        )
    try:
        run.mkdir(parents=True)
    except FileExistsError:
        raise UserError(
            f"{run} exists already: choose another name=, or continue that run with --resume {run}"
        ) from None
    except OSError as error:
        raise UserError(f"runs: cannot make {run}: {error.strerror}") from None
    described: dict[str, Any] = {
        "path": config.data.path,
        "fingerprint": dataset.fingerprint,
        "summary": dataset.summary,
        "users": dataset.users,
        "items": dataset.items,
    }
    write_atomically(run / DATASET_FILE, json.dumps(described, indent=2))
    write_atomically(run / CONFIG_FILE, configs.dump(config))  # last: a folder that has it is whole
    return run


def release_name(run: AnyPath, *, keep: bool) -> None:
    """Makes the name of a run free again if it failed before its first step.

    The folder is removed, or with `keep` renamed to `NAME.failed-TIME`, so that its logs can be read (an object store
    cannot rename: there it is removed). A run that has started keeps its folder: it may have checkpoints.
    """
    events = read_events(run / METRICS_FILE) if (run / METRICS_FILE).exists() else []
    if any(event["event"] == "start" for event in events):
        return
    if isinstance(run, StorePath):
        run.remove()
    elif keep:
        run.rename(run.with_name(f"{run.name}.failed-{time.strftime('%Y%m%d-%H%M%S')}"))
    else:
        shutil.rmtree(run, ignore_errors=True)


def reopen(run: str | AnyPath, overrides: list[str]) -> tuple[Config, AnyPath]:
    """The settings of an existing run with `key=value` overrides, and its folder.

    `runs` is where the run is now: a folder of runs may have moved, with the exposure vectors in it.
    """
    folder = path_at(run)
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"{run}: not a run folder, it has no {CONFIG_FILE}")
    settings = read_yaml(folder / CONFIG_FILE)
    if isinstance(exposures := settings.get("exposures"), dict):
        exposures.setdefault("shrink", False)  # runs of earlier versions do not say
        exposures.setdefault("version", 2)
    config = configs.from_mapping(settings, overrides, source=str(folder / CONFIG_FILE))
    config.runs = str(folder.parent)
    return config, folder


def data_of(config: Config, run: str | AnyPath) -> Dataset:
    """The data set of an existing run; if it cannot be opened, the error says how to give its new path."""
    try:
        return Dataset.open(config.data.path)
    except UserError as error:
        raise UserError(f"{error}\n{run} was trained on it: if it has moved, add data.path=FOLDER") from None


def checkpoints(config: Config, run: AnyPath) -> str:
    """Where the checkpoints of a run are: a local path or a URI."""
    return f"{config.checkpoint.path.rstrip('/')}/{run.name}" if config.checkpoint.path else str(run / "checkpoints")


class StopRequests:
    """Whether somebody asked the run to save and stop. An object store is asked every few seconds only."""

    def __init__(self, run: AnyPath) -> None:
        self._file, self._next = run / STOP_FILE, 0.0

    def asked(self) -> bool:
        """Whether the stop file is there."""
        if isinstance(self._file, StorePath):
            if time.monotonic() < self._next:
                return False
            self._next = time.monotonic() + _ASK_STORE_S
        return self._file.exists()
