"""Real training runs by Ray, for figures that only those have."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from invdist.runtime.install import check_stack

_NUMBER = itertools.count()


def ray_for(workers: int) -> AbstractContextManager[None]:
    """Connects to a private Ray with a CPU for each worker."""
    check_stack()
    from invdist.training import ray_backend

    return ray_backend.connected(cpus=workers)


def ray_epochs(
    data: str, folder: Path, settings: dict[str, Any], *, workers: int, epochs: int, threads: int = 1
) -> list[dict[str, Any]]:
    """Trains by plain steps with `settings`, and gives the `epoch` events of the run."""
    from invdist import config as configs
    from invdist.data.dataset import Dataset
    from invdist.training import ray_backend, run_folder
    from invdist.training.history import METRICS_FILE, read_events

    overrides = [
        f"data.path={data}",
        f"runs={folder}",
        f"name=run-{next(_NUMBER)}",
        f"training.epochs={epochs}",
        f"training.patience={epochs}",
        "training.test=false",
        f"ray.workers={workers}",
        f"ray.cpus_per_worker={threads}",
        "ray.device=cpu",
    ]
    config = configs.from_mapping({"method": "none", "unlabeled": {"source": "sampled"}} | settings, overrides)
    run = run_folder.create(config, Dataset.open(data))
    ray_backend.fit(config, run)
    return [event for event in read_events(run / METRICS_FILE) if event["event"] == "epoch"]
