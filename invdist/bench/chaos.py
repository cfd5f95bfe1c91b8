"""Kills workers at random while they train, and compares the result with that of an undisturbed run.

`kills` counts SIGKILLs that hit a working rank; `max_recovery_s` is the longest time from a kill to the next step of
the restarted group; `lost_rows` and `doubled_rows` are interactions that an epoch missed or trained twice;
`weights_equal` is true if the last checkpoints of both runs are equal to the bit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from invdist.runtime.install import check_stack
from invdist.training.history import METRICS_FILE, Tail

_SETTINGS: dict[str, Any] = {
    "method": "ig",
    "data": {"batch_size": 256},
    "unlabeled": {"rate": 2},
    "rows": {"dim": 16, "sharding": "row_wise"},
    "training": {"patience": 1_000_000, "log_every": 1},
    "checkpoint": {"every_steps": 20},
    "ray": {"workers": 2, "device": "cpu", "max_failures": -1, "timeout_s": 60},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `invdist bench chaos`."""
    parser.add_argument("--minutes", type=float, default=2.0, help="how long to kill workers (default: 2)")
    parser.add_argument("--kills", type=int, default=1_000_000, help="most kills")
    parser.add_argument("--epochs", type=int, default=0, help="length of the run (default: what fits the minutes)")
    parser.add_argument("--data", help="a prepared data set (default: the synthetic preset tiny)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the kills")


def run(args: argparse.Namespace) -> dict[str, object]:
    """Trains twice, once with kills, and compares."""
    check_stack()
    from invdist import config as configs
    from invdist.data.dataset import Dataset
    from invdist.training import ray_backend, run_folder
    from invdist.training.compare import rows_seen, same_weights

    with tempfile.TemporaryDirectory() as folder, ray_backend.connected(cpus=2):
        data = args.data or _tiny(folder)
        dataset = Dataset.open(data)
        # Without kills the smallest data set takes about 200 epochs a minute.
        epochs = args.epochs or max(20, int(30 * args.minutes))
        runs: dict[str, Path] = {}
        killer = _Killer(args.minutes * 60, args.kills, args.seed)
        for name in ("disturbed", "undisturbed"):
            overrides = [f"data.path={data}", f"training.epochs={epochs}", f"runs={folder}", f"name={name}"]
            config = configs.from_mapping(_SETTINGS, overrides)
            runs[name] = Path(str(run_folder.create(config, dataset)))
            with killer.watching(runs[name]) if name == "disturbed" else contextlib.nullcontext():
                ray_backend.fit(config, runs[name])
        rows = dataset.rows["train"] + dataset.rows["training_test"]
        return {
            "kills": killer.kills,
            **rows_seen(runs["disturbed"], rows),
            "epochs": epochs,
            "weights_equal": same_weights(runs["disturbed"], runs["undisturbed"]),
            "max_recovery_s": max(killer.recoveries, default=0.0),
            "mean_recovery_s": sum(killer.recoveries) / max(len(killer.recoveries), 1),
        }


def _tiny(folder: str) -> str:
    from invdist.data.prepare.options import build_options
    from invdist.data.prepare.pipeline import prepare_log

    data = str(Path(folder) / "data")
    prepare_log(build_options("synthetic", {"preset": "tiny"}), [], data)
    return data


class _Killer:
    """Kills a random rank of a run every few seconds while it trains, and measures how long training stops."""

    def __init__(self, seconds: float, most: int, seed: int) -> None:
        self.kills, self.recoveries = 0, []
        self._seconds, self._most, self._random = seconds, most, random.Random(seed)
        self._end = threading.Event()

    @contextlib.contextmanager
    def watching(self, run: Path):
        """Kills from a background thread while the block runs."""
        thread = threading.Thread(target=self._watch, args=(Tail(run / METRICS_FILE),), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join()

    def _watch(self, tail: Tail) -> None:
        deadline = time.monotonic() + self._seconds
        killed_at: float | None = None
        pids: list[int] = []
        steps_to_go = 0
        while not self._end.wait(0.02):
            for event in tail.new():
                if event["event"] == "start":
                    pids, steps_to_go = event["pids"], self._random.randrange(5, 150)
                elif event["event"] == "step" and pids:
                    if killed_at is not None:
                        self.recoveries.append(time.monotonic() - killed_at)
                        killed_at = None
                    steps_to_go -= 1
            if pids and steps_to_go <= 0 and time.monotonic() < deadline and self.kills < self._most:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._random.choice(pids), signal.SIGKILL)
                    self.kills += 1
                    killed_at = time.monotonic()
                pids = []
