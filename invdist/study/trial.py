"""One trial: a training run in a folder of its own, with a line that says how it ended."""

from __future__ import annotations

import json
import shutil
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from invdist import config as configs
from invdist.data.dataset import Dataset
from invdist.runtime.errors import UserError
from invdist.study.space import Case, Point
from invdist.training import run_folder
from invdist.training.history import METRICS_FILE, History
from invdist.training.run_folder import write_atomically

RESULT_FILE = "trial.json"
TUNING, TESTING = "tuning", "seed"

FINISHED, STOPPED, FAILED = "finished", "stopped early", "failed"


@dataclass(frozen=True)
class Trial:
    """A run to make: one point of a case, with one seed."""

    case: Case
    role: str
    """`tuning`, or `seed`: a run of the selected setting, the only one that sees the test rows."""
    seed: int
    point: Point
    config: str
    """Its training config as YAML."""
    folder: Path

    @property
    def result(self) -> Result | None:
        """How it ended, None if it has not."""
        return Result.read(self.folder)


@dataclass(kw_only=True, slots=True)
class Result:
    """How a trial ended."""

    status: str
    """`finished`, `stopped early` or `failed`."""
    reason: str | None = None
    """Why it failed."""
    best: float | None = None
    """The selection metric at the best epoch, on validation rows."""
    best_epoch: int | None = None
    epochs: int = 0
    seconds: float = 0.0
    rows_per_s: float | None = None
    valid: dict[str, float] = field(default_factory=dict)
    test: dict[str, float] = field(default_factory=dict)
    annotation_auc: float | None = None
    directions: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Result | None:
        """The result in a trial's folder, if it has one."""
        path = folder / RESULT_FILE
        return cls(**json.loads(path.read_text())) if path.is_file() else None

    def write(self, folder: Path) -> None:
        """Makes it the result of a trial's folder."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / RESULT_FILE, json.dumps(asdict(self), indent=1))


def open_folder(config: configs.Config, folder: Path) -> None:
    """Makes the run folder of a trial, or leaves it as a killed study left it: training continues there."""
    if (folder / run_folder.CONFIG_FILE).is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    config.runs, config.name = str(folder.parent), folder.name
    run_folder.create(config, Dataset.open(config.data.path, verify="fast"))


def epoch_metrics(folder: Path, metric: str) -> list[float]:
    """The selection metric after each epoch that a run folder tells of."""
    if not (folder / METRICS_FILE).is_file():
        return []
    return [epoch["valid"][metric] for epoch in History.read(folder).epochs]


def result_of(folder: Path, metric: str, status: str = FINISHED) -> Result:
    """The result that the events of a run folder tell."""
    history = History.read(folder)
    final, epochs = history.final or {}, history.epochs
    scores = [epoch["valid"][metric] for epoch in epochs]
    at = max(range(len(scores)), key=lambda i: scores[i]) if scores else None
    best = epochs[at] if at is not None else {}
    rows, seconds = sum(epoch["rows"] for epoch in epochs), sum(epoch["seconds"] for epoch in epochs)
    return Result(
        status=status,
        best=scores[at] if at is not None else None,
        best_epoch=best.get("epoch"),
        epochs=len(epochs),
        seconds=seconds,
        rows_per_s=rows / seconds if seconds else None,
        valid=best.get("valid") or {},
        test=final.get("test") or {},
        annotation_auc=(final.get("annotations") or best.get("annotations") or {}).get("auc"),
        directions=final.get("directions") or {},
    )


def run(
    text: str, folder: Path, keep_checkpoints: bool, on_epoch: Callable[[dict[str, Any]], None], *, cuda: bool = False
) -> None:
    """Trains in this process, on one rank, and writes the result; what goes wrong is a result, too."""
    try:
        config = configs.from_text(text)
        open_folder(config, folder)
        device = _join_group(cuda)
        from invdist.training.trainer import Trainer

        Trainer(config, folder, device=device).fit(on_epoch)
        result = result_of(folder, config.training.metric)
    except Exception as error:
        result = failure(folder, error)
    _end(result, folder, keep_checkpoints)


def run_on_group(text: str, folder: Path, keep_checkpoints: bool) -> None:
    """Trains over the ranks that the config asks for, as a Ray Train job of its own, and writes the result.

    A job that was stopped early has a result by then.
    """
    from invdist.training import ray_backend

    try:
        config = configs.from_text(text)
        open_folder(config, folder)
        ray_backend.fit(config, folder)
        result = result_of(folder, config.training.metric)
    except Exception as error:
        result = failure(folder, error)
    _end(result, folder, keep_checkpoints)


def _end(result: Result, folder: Path, keep_checkpoints: bool) -> None:
    if Result.read(folder) is None:
        result.write(folder)
    if not keep_checkpoints:
        forget_weights(folder)


def forget_weights(folder: Path) -> None:
    """Removes the checkpoints of a trial that has its result."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def failure(folder: Path, error: BaseException) -> Result:
    """The result of a trial that could not go on; the traceback is kept in its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    (folder / "error.txt").write_text(f"{stamp}\n{''.join(traceback.format_exception(error))}")
    return Result(status=FAILED, reason=" ".join(reason.split())[:500])


def _join_group(cuda: bool):
    """The device of this process, which is a group by itself: an actor that is used again is one already."""
    import torch
    import torch.distributed as dist

    from invdist.runtime.process import configure_process

    configure_process(threads=1)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    return torch.device("cuda" if cuda else "cpu")
