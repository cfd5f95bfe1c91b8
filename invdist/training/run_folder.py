"""The folder of a run: what is in it, and how it is made."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from invdist import config as configs
from invdist.config import Config
from invdist.data.dataset import Dataset
from invdist.runtime.errors import UserError
from invdist.runtime.files import Folder

CONFIG_FILE = "config.yaml"
DATASET_FILE = "dataset.json"
FAILED_FILE = "failed.json"
"""Written by a worker that found something only the user can mend."""
STOP_FILE = "stop"
"""A file of this name asks a run to save and end."""


def create(config: Config, dataset: Dataset) -> Path:
    """Makes the folder of a new run with its settings and what its data set is."""
    name = config.name or f"{config.method}-{config.model}-{time.strftime('%Y%m%d-%H%M%S')}"
    run = Path(config.runs).absolute() / name
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
    write_atomically(run / CONFIG_FILE, configs.dump(config))
    described: dict[str, Any] = {
        "path": config.data.path,
        "fingerprint": dataset.fingerprint,
        "summary": dataset.summary,
        "users": dataset.users,
        "items": dataset.items,
    }
    write_atomically(run / DATASET_FILE, json.dumps(described, indent=2))
    return run


def reopen(run: str | Path, overrides: list[str]) -> tuple[Config, Path]:
    """The settings of an existing run, with overrides laid over them."""
    folder = Path(run).absolute()
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"{run}: not a run folder, it has no {CONFIG_FILE}")
    return configs.load(folder / CONFIG_FILE, overrides), folder


def data_of(config: Config, run: str | Path) -> Dataset:
    """The data set of an existing run; where it cannot be opened, the error says how to name its new place."""
    try:
        return Dataset.open(config.data.path)
    except UserError as error:
        raise UserError(f"{error}\n{run} was trained on it: if it has moved, add data.path=FOLDER") from None


def checkpoints(config: Config, run: Path) -> str:
    """Where the checkpoints of a run are: a local path or a URI."""
    return f"{config.checkpoint.path.rstrip('/')}/{run.name}" if config.checkpoint.path else str(run / "checkpoints")


def write_atomically(path: Path, text: str) -> None:
    """Writes a small file so that nobody ever sees half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
