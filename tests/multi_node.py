"""Run as a script by `test_multi_node.py`: prepare, train, evaluate, annotate and recommend on a Ray of three nodes.

    python tests/multi_node.py FOLDER

FOLDER has `log.parquet`, `config.yaml` and `users.csv`. No process may have as much memory as the tables take: `limit`.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

LIMIT = 800 << 20
"""Bytes of private memory that a process may have beyond its imports."""
STORE = 256 << 20
"""Bytes of each node's object store: nobody keeps the tables there either."""
WORKERS = 4


_noted: dict[str, int] = {}


def limit(worker: object = None) -> None:
    """Limits this process (RLIMIT_DATA) to `LIMIT` bytes beyond what it has, and notes the most that it has later.

    Ray calls this in every process of the job before anything else; those that hold tables call it again after their
    imports, because torch maps half a gigabyte when it is imported, most of which it never uses.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (_memory("VmData") + LIMIT, resource.RLIM_INFINITY))
    new, _noted["before"] = not _noted, _held()
    if new:
        threading.Thread(target=_note_peak, args=(Path(os.environ["PEAKS"]),), daemon=True).start()


def _note_peak(folder: Path) -> None:
    peaks: dict[int, int] = {}
    while True:
        before = _noted["before"]
        if (beyond := _held() - before) > peaks.get(before, 0) + (1 << 20):
            peaks[before] = beyond
            work = Path("/proc/self/cmdline").read_text().split("\0")[0]
            with open(folder / str(os.getpid()), "a") as file:
                file.write(json.dumps({"work": work, "bytes": beyond}) + "\n")
        time.sleep(0.05)


def _held() -> int:
    """Memory of this process; what ranks of this host share is divided among those that use it."""
    return _memory("RssAnon") + _memory("Pss_Shmem", "smaps_rollup")


def _memory(name: str, file: str = "status") -> int:
    lines = (line.split() for line in Path(f"/proc/self/{file}").read_text().splitlines())
    return next(int(size[0]) for key, *size in lines if key == f"{name}:") * 1024


def hold_whole(run: str) -> str:
    """Reads the whole tables of a run into this process; gives the error."""
    from invdist.serving.run import open_run

    limit()
    try:
        open_run(run)
    except RuntimeError as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    """Does all of it; the test looks at what is in the folder afterwards."""
    import ray
    from ray.cluster_utils import Cluster

    from invdist.cli import prepare

    node = {"object_store_memory": STORE, "include_dashboard": False}
    # Without a hook at exit, which only the main thread could set: a node is added by another one.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **node}, shutdown_at_exit=False)
    nodes = [cluster.add_node(num_cpus=1, **node) for _ in range(2)]
    hook = {"worker_process_setup_hook": "tests.multi_node.limit"}
    ray.init(cluster.address, log_to_driver=False, runtime_env=hook)
    limit()
    try:
        data = str(folder / "data")
        log = ["--input", str(folder / "log.parquet")]
        assert prepare.main(["microvideo", *log, "--output", data, "--workers", str(WORKERS)]) == 0
        run = _train(folder, cluster, nodes[1], node)
        assert "can't allocate memory" in ray.get(ray.remote(hold_whole).remote(run))
        _use(folder, run)
    finally:
        ray.shutdown()
        cluster.shutdown()


def _train(folder: Path, cluster, lost, node: dict) -> str:
    """Trains on all nodes; one is lost once a checkpoint is there, and another one comes instead."""
    from invdist import config as configs
    from invdist.data.dataset import Dataset
    from invdist.training import ray_backend, run_folder

    config = configs.load(str(folder / "config.yaml"))
    run = Path(str(run_folder.create(config, Dataset.open(config.data.path))))

    def replace_when_saved() -> None:
        while not list(run.glob("checkpoints/step-*/manifest.json")):
            time.sleep(0.05)
        cluster.remove_node(lost, allow_graceful=False)
        cluster.add_node(num_cpus=1, **node)
        (folder / "node lost").touch()

    threading.Thread(target=replace_when_saved, daemon=True).start()
    ray_backend.fit(config, run, limited_worker)
    return str(run)


def limited_worker(settings: dict[str, str]) -> None:
    """A rank of the training."""
    import torchrec.distributed.planner  # noqa: F401

    import invdist.training.trainer  # noqa: F401
    from invdist.training import ray_backend

    limit()
    ray_backend.train_worker(settings)


def _use(folder: Path, run: str) -> None:
    """What a finished run is for, on workers of all nodes that hold a slice of the tables each."""
    from invdist.cli import annotate, evaluate, recommend
    from invdist.serving.run import find_run
    from invdist.serving.sharded import choice
    from invdist.serving.sharded.workers import Workers

    group = Workers(find_run(run), WORKERS)
    choice.sharded = lambda run, workers: nullcontext(group)  # one group for all commands: to start it takes long
    try:
        assert len(set(group.everywhere(_node))) == 3
        list(group.everywhere(limit))
        group.load()
        sharded = ["--run", run, "--tables", "sharded"]
        with open(folder / "evaluate.json", "w") as file, contextlib.redirect_stdout(file):
            assert evaluate.main([*sharded, "--json"]) == 0
        assert annotate.main([*sharded, "--output", str(folder / "annotate")]) == 0
        users = ["--users", str(folder / "users.csv")]
        assert recommend.main([*sharded, *users, "--output", str(folder / "recommend")]) == 0
    finally:
        group.close()


def _node(worker: object) -> str:
    import ray

    return ray.get_runtime_context().get_node_id()


if __name__ == "__main__":
    from tests import multi_node  # by this name workers find it, too

    multi_node.main(Path(sys.argv[1]))
