"""One trial: a training run in its own folder, with a file that says how it ended."""

from __future__ import annotations

import json
import shutil
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from invdist import config as configs
from invdist.data.dataset import Dataset
from invdist.runtime.errors import UserError
from invdist.runtime.files import write_atomically
from invdist.study.space import Case, Point
from invdist.training import run_folder
from invdist.training.history import METRICS_FILE, History
from invdist.training.sizes import suited

RESULT_FILE = "trial.json"
TUNING, TESTING = "tuning", "seed"

FINISHED, STOPPED, FAILED = "finished", "stopped early", "failed"


@dataclass(frozen=True)
class Trial:
    """A run to make: one point of a case, with one seed."""

    case: Case
    role: str
    """`tuning`, or `seed`: a run of the selected setting, the only kind that sees the test rows."""
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

    @classmethod
    def failure(cls, reason: str) -> Result:
        """The result of a trial that failed; the reason is cut to one short line."""
        return cls(status=FAILED, reason=" ".join(reason.split())[:500])

    def write(self, folder: Path) -> None:
        """Writes it into a trial's folder, unless the trial has a result already."""
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / RESULT_FILE).is_file():
            write_atomically(folder / RESULT_FILE, json.dumps(asdict(self), indent=1))


def epoch_metrics(folder: Path, metric: str) -> list[float]:
    """The selection metric after each epoch recorded in a run folder."""
    if not (folder / METRICS_FILE).is_file():
        return []
    return [epoch["valid"][metric] for epoch in History.read(folder).epochs]


def result_of(folder: Path, metric: str, status: str = FINISHED) -> Result:
    """The result that the events of a run folder give."""
    history = History.read(folder)
    final, epochs = history.final or {}, history.epochs
    best = max(epochs, key=lambda epoch: epoch["valid"][metric], default={})
    rows, seconds = sum(epoch["rows"] for epoch in epochs), sum(epoch["seconds"] for epoch in epochs)
    return Result(
        status=status,
        best=best["valid"][metric] if best else None,
        best_epoch=best.get("epoch"),
        epochs=len(epochs),
        seconds=seconds,
        rows_per_s=rows / seconds if seconds else None,
        valid=best.get("valid") or {},
        test=final.get("test") or {},
        annotation_auc=(final.get("annotations") or best.get("annotations") or {}).get("auc"),
        directions=final.get("directions") or {},
    )


def run(text: str, folder: Path, keep_checkpoints: bool, on_epoch: Callable[[], None], *, cuda: bool = False) -> None:
    """Trains in this process, on one rank, and writes the result; an exception becomes a failed result."""

    def fit(config: configs.Config) -> None:
        device = _join_group(cuda)
        from invdist.training.trainer import Trainer

        Trainer(config, folder, device=device).fit(lambda valid: on_epoch())

    _run(fit, text, folder, keep_checkpoints)


def run_on_group(text: str, folder: Path, keep_checkpoints: bool) -> None:
    """Trains on the number of ranks in the config, as a Ray Train job, and writes the result."""

    def fit(config: configs.Config) -> None:
        from invdist.training import ray_backend

        ray_backend.fit(config, folder)

    _run(fit, text, folder, keep_checkpoints)


def _run(fit: Callable[[configs.Config], None], text: str, folder: Path, keep_checkpoints: bool) -> None:
    try:
        config = configs.from_text(text)
        dataset = Dataset.open(config.data.path, verify="fast")
        config = suited(config, dataset)
        _open_folder(config, dataset, folder)
        fit(config)
        result = result_of(folder, config.training.metric)
    except Exception as error:
        folder.mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        (folder / "error.txt").write_text(f"{stamp}\n{''.join(traceback.format_exception(error))}")
        result = Result.failure(str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")
    result.write(folder)
    if not keep_checkpoints:
        remove_checkpoints(folder)


def remove_checkpoints(folder: Path) -> None:
    """Removes the checkpoints of a trial that has its result."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def _open_folder(config: configs.Config, dataset: Dataset, folder: Path) -> None:
    """Makes the run folder of a trial. One that a killed study left is kept: training continues there."""
    if (folder / run_folder.CONFIG_FILE).is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    config.runs, config.name = str(folder.parent), folder.name
    run_folder.create(config, dataset)


def _join_group(cuda: bool):
    """Makes this process a group of one rank, unless an earlier trial in it did; returns its device."""
    import torch
    import torch.distributed as dist

    from invdist.runtime.process import configure_process

    configure_process(threads=1)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    return torch.device("cuda" if cuda else "cpu")
