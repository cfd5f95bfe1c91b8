"""All of it on several nodes, in processes none of which could hold the tables, against one process that does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from invdist import config as configs
from invdist.cli import annotate, evaluate, recommend
from invdist.data.dataset import Dataset
from invdist.data.prepare.options import MicroVideo
from invdist.data.prepare.pipeline import prepare_log
from invdist.runtime.process import single_rank
from invdist.serving.run import find_run
from invdist.training import run_folder
from invdist.training.compare import rows_seen
from invdist.training.history import History
from invdist.training.trainer import Trainer
from tests.data.prepare.parallel.test_parallel import content
from tests.multi_node import LIMIT, STORE, WORKERS

USERS, ITEMS, DIM = 1_000_000, 2_000, 256
SETTINGS = {
    "method": "ig",
    "data": {"batch_size": 8192, "readers": 2},
    "rows": {"dim": DIM, "sharding": "row_wise", "optimizer": "rowwise_adagrad", "bias": True},
    "optimizer": {"gamma": 0.1},
    "training": {"epochs": 1},
    "checkpoint": {"every_steps": 10, "asynchronous": False},  # in the background it would need a copy of the rows
    "ray": {"workers": WORKERS, "device": "cpu", "timeout_s": 60},
}


def write_log(folder: Path) -> None:
    """One play of each user, a third of them clear; and some users to recommend to."""
    source = np.random.default_rng(0)
    user = source.permutation(USERS) * 7919 + 11
    item = source.integers(ITEMS, size=USERS)
    liked = source.random(ITEMS)[item] > source.random(USERS)
    finished = np.where(source.random(USERS) < 1 / 3, np.where(liked, 1.0, 0.01), 0.4)
    table = {"user": user, "item": item, "play_time": 10_000 * finished, "duration": np.full(USERS, 10_000.0)}
    pq.write_table(pa.table(table), folder / "log.parquet", row_group_size=1 << 17)
    (folder / "users.csv").write_text("\n".join(map(str, ["user", *user[:3000], "5"])))


def on_a_cluster(folder: Path, repository: Path) -> str:
    """Does all of it on three nodes; gives what was printed."""
    (folder / "peaks").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(repository), "PEAKS": str(folder / "peaks")}
    environment["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # its own one maps a gigabyte at once
    command = [sys.executable, str(repository / "tests" / "multi_node.py"), str(folder)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.mark.slow
def test_nodes_do_together_what_no_process_could(
    tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(tmp_path)
    data, runs = tmp_path / "data", [f"data.path={tmp_path / 'data'}", f"runs={tmp_path}"]
    (tmp_path / "config.yaml").write_text(configs.dump(configs.from_mapping(SETTINGS, [*runs, "name=run"])))
    on_a_cluster(tmp_path, repository)
    assert (tmp_path / "node lost").exists()

    prepare_log(MicroVideo(), [tmp_path / "log.parquet"], tmp_path / "alone")
    assert content(data) == content(tmp_path / "alone")

    run, dataset = tmp_path / "run", Dataset.open(str(data))
    tables = find_run(run).tables
    assert tables.bytes == (USERS + ITEMS) * tables.columns * 4 > 1.2 * max(LIMIT, STORE)
    history = History.read(run)
    assert [event["world_size"] for event in history.of("start")] == [WORKERS, WORKERS]
    assert rows_seen(run, dataset.rows["train"] + dataset.rows["training_test"]) == {"lost_rows": 0, "doubled_rows": 0}
    peaks = [json.loads(line) for file in (tmp_path / "peaks").iterdir() for line in file.read_text().splitlines()]
    assert max(peak["bytes"] for peak in peaks) < tables.bytes
    for kind in ("RayTrainWorker", "_Worker"):
        assert max(peak["bytes"] for peak in peaks if kind in peak["work"]) > tables.bytes / WORKERS

    one = configs.from_mapping(
        SETTINGS, [*runs, "name=one", "ray.workers=1", "data.readers=0", "checkpoint.every_steps=0"]
    )
    folder = run_folder.create(one, dataset)
    with single_rank():
        Trainer(one, folder, device=torch.device("cpu")).fit()
    (final,), (expected,) = (History.read(Path(str(path))).of("final") for path in (run, folder))
    assert final["directions"] == expected["directions"]
    assert final["test"] == pytest.approx(expected["test"], abs=1e-5)
    assert final["test"]["auc"] > 0.7

    whole = ["--run", str(run), "--tables", "whole"]
    capsys.readouterr()
    assert evaluate.main([*whole, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "evaluate.json").read_text())
    to = {name: str(tmp_path / f"{name} whole") for name in ("annotate", "recommend")}
    assert annotate.main([*whole, "--output", to["annotate"], "--workers", "0"]) == 0
    assert recommend.main([*whole, "--output", to["recommend"], "--users", str(tmp_path / "users.csv")]) == 0
    for name, folder in to.items():
        assert content(tmp_path / name) == content(Path(folder))
