"""Run as a script by `test_readers.py`: where the actors of `ray_readers` are on a Ray of two nodes.

    python tests/data/stream/two_nodes.py DATA

A process of its own, because it starts a Ray of several nodes beside the tests' own.
"""

from __future__ import annotations

import sys
from typing import Any

import ray
from ray.cluster_utils import Cluster

from invdist.data.stream.batches import StreamSpec, UnlabeledSpec, ray_readers


def main(data: str) -> None:
    """Four readers, four parts of the observed pairs and two ranks for each of two nodes; several times."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    ray.init(cluster.address, log_to_driver=False)
    nodes: list[Any] = sorted(node["NodeID"] for node in ray.nodes())
    spec = StreamSpec(path=data, unlabeled_per_row=1, unlabeled=UnlabeledSpec(source="sampled"))
    readers = ray_readers(spec, 4, [nodes[0], nodes[1]] * 2)
    for actors in (readers, readers.parts, [readers.of_nodes[rank] for rank in range(4)]):
        asked = [actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()) for actor in actors]
        assert ray.get(asked, timeout=120) == [nodes[0], nodes[1]] * 2, actors
    assert len(set(readers.of_nodes.values())) == 2
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
