"""Run as a script by `test_faults.py`: a two-node Ray loses a node in the middle of a run, which goes on without it.

    python tests/training/node_loss.py CONFIG_FILE

A process of its own, because it starts a Ray of several nodes (`ray.cluster_utils.Cluster`) beside the tests' own.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from invdist import config as configs
from invdist.data.dataset import Dataset
from invdist.training import ray_backend, run_folder


def main(config_file: str) -> None:
    """Trains on two nodes of one CPU each, and removes the second once a checkpoint is there."""
    config = configs.load(config_file)
    run = Path(str(run_folder.create(config, Dataset.open(config.data.path))))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    ray.init(cluster.address, log_to_driver=False)

    def remove_when_saved() -> None:
        while not list(run.glob("checkpoints/step-*/manifest.json")):
            time.sleep(0.05)
        cluster.remove_node(second, allow_graceful=False)
        (run / "node removed").touch()

    threading.Thread(target=remove_when_saved, daemon=True).start()
    try:
        ray_backend.fit(config, run)
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(str(Path(sys.argv[1])))
