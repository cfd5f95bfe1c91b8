"""Training metrics on the page that Prometheus reads from a real Ray."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from invdist.training.history import History, direction_name
from invdist.training.ray_metrics import node_metrics

_PERIOD = 40.0


class _Watched:
    """A process of Ray that trains a run and stays, so that its metrics stay too."""

    def train(self, data: str, run: str) -> None:
        import torch

        from invdist import config as configs
        from invdist.data.dataset import Dataset
        from invdist.runtime.process import single_rank
        from invdist.training import run_folder
        from invdist.training.ray_metrics import RayMetrics
        from invdist.training.trainer import Trainer
        from tests.runs import SETTINGS

        where = Path(run)
        given = [f"data.path={data}", f"runs={where.parent}", f"name={where.name}", "training.epochs=2"]
        config = configs.from_mapping(SETTINGS, given)
        folder = run_folder.create(config, Dataset.open(data))
        with single_rank():
            Trainer(config, folder, device=torch.device("cpu"), sinks=[RayMetrics(where.name)]).fit()


@pytest.mark.usefixtures("ray_cluster")
def test_a_training_is_on_the_page_of_prometheus(tiny_data: Path, tmp_path: Path) -> None:
    import ray

    trainer: Any = ray.remote(num_cpus=0)(_Watched).remote()
    ray.get(trainer.train.remote(str(tiny_data), str(tmp_path / "watched")))
    events = History.read(tmp_path / "watched").events
    deadline = time.monotonic() + _PERIOD
    while (page := _page()) and time.monotonic() < deadline and "final" not in page:
        time.sleep(0.5)
    ray.kill(trainer)

    steps = [event for event in events if event["event"] == "step"]
    epochs = [event for event in events if event["event"] == "epoch"]
    assert _value(page, "global_step") == epochs[-1]["global_step"]
    assert _value(page, "loss") == pytest.approx(epochs[-1]["loss"])
    assert _value(page, "rows_per_s") == pytest.approx(epochs[-1]["rows_per_s"])
    chosen = [direction_name(event["direction"]) for event in steps if event.get("direction") is not None]
    for name in set(chosen):
        assert _value(page, "directions_total", f'direction="{name}"') == chosen.count(name)
    assert _value(page, "valid", 'metric="auc"') == pytest.approx(epochs[-1]["valid"]["auc"])


def _page() -> str:
    return node_metrics("ray_invdist_train_") or "nothing yet"


def _value(page: str, name: str, tag: str = "") -> float:
    lines = re.findall(rf"^ray_invdist_train_{name}\{{([^}}]*)\}} (\S+)$", page, re.M)
    found = [float(value) for tags, value in lines if tag in tags and 'run="watched"' in tags]
    assert len(found) == 1, (name, tag, page)
    return found[0]
