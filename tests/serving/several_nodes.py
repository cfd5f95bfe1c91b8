"""Run as a script by `test_several_nodes.py`: a data set, a run and its use on a Ray of three nodes, one of them lost.

    python tests/serving/several_nodes.py FOLDER

Serving workers get a limit of memory beyond their imports that is far below the size of the tables. A process of its
own, because it starts a Ray of several nodes (`ray.cluster_utils.Cluster`) beside the tests' own.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.cluster_utils import Cluster

from invdist import config as configs
from invdist.cli import annotate, evaluate, prepare, recommend
from invdist.data.dataset import Dataset
from invdist.training import ray_backend, run_folder

USERS, ITEMS, DIM = 80_000, 60_000, 512
"""Tables of 287 MB."""
CAP = 190 << 20
_STORE: dict[str, Any] = {"object_store_memory": 200 << 20}


def main(folder: Path) -> None:
    """Prepares, trains on four workers over three nodes, loses one node, evaluates, annotates and recommends."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **_STORE})
    cluster.add_node(num_cpus=2, **_STORE)
    third = cluster.add_node(num_cpus=2, **_STORE)
    try:
        ray.init(cluster.address, log_to_driver=False)
        _prepare(folder)
        run = _train(folder, cluster, third)
        ray.shutdown()
        ray.init(cluster.address, log_to_driver=False, runtime_env={"worker_process_setup_hook": limit_memory})
        _use(folder, run)
    finally:
        ray.shutdown()
        cluster.shutdown()


def limit_memory() -> None:
    """Run by Ray in each new worker: after the imports of serving, at most `CAP` bytes more for data of its own."""
    import resource

    import invdist.serving.sharded.jobs  # noqa: F401

    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    limit = int(status["VmData"].split()[0]) * 1024 + CAP
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _prepare(folder: Path) -> None:
    source, rows = np.random.default_rng(0), 2 * USERS
    item = np.concatenate([np.arange(ITEMS), source.integers(ITEMS, size=rows - ITEMS)])
    columns = {"user": np.arange(rows) % USERS, "item": item, "rating": source.integers(1, 6, size=rows)}
    pq.write_table(pa.table({**columns, "timestamp": np.arange(rows)}), folder / "log.parquet")
    given = ["ratings", "--input", str(folder / "log.parquet"), "--output", str(folder / "data")]
    assert prepare.main([*given, "positive_from=4", "negative_to=2"]) == 0


def _train(folder: Path, cluster: Cluster, lost: Any) -> Path:
    settings = {
        "method": "none",
        "runs": str(folder),
        "name": "run",
        "data": {"path": str(folder / "data"), "batch_size": 4096, "readers": 0},
        "rows": {"dim": DIM, "sharding": "row_wise", "optimizer": "sgd"},
        "training": {"epochs": 2},
        "ray": {"workers": 4, "max_failures": 3},
    }
    config = configs.from_mapping(settings)
    run = run_folder.create(config, Dataset.open(config.data.path))
    assert isinstance(run, Path)

    def remove_when_saved() -> None:
        while not list(run.glob("checkpoints/step-*/manifest.json")):
            time.sleep(0.05)
        cluster.remove_node(lost, allow_graceful=False)
        (run / "node removed").touch()

    threading.Thread(target=remove_when_saved, daemon=True).start()
    ray_backend.fit(config, run)
    return run


def _use(folder: Path, run: Path) -> None:
    """Uses the run with sharded tables; the test compares what comes out with whole tables."""
    how = ["--run", str(run), "--tables", "sharded", "--workers", "4"]
    assert annotate.main([*how, "--output", str(folder / "labels"), "--part-rows", "10000"]) == 0
    (folder / "users.csv").write_text("user\n" + "\n".join(map(str, range(0, USERS, 400))))
    assert recommend.main([*how, "--output", str(folder / "best"), "--users", str(folder / "users.csv")]) == 0
    assert evaluate.main([*how, "--json"]) == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]))
