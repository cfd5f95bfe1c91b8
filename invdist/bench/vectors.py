"""Cost of learning exposure vectors: an exposure in one product against an interaction of a plain training step.

Every rank is a process with one thread, and has its own uniformly random pairs: the hardest case, because hardly any
table row repeats. Products and plain steps take turns. `ratio` is the CPU time of an exposure in one product over that
of an interaction in a plain step. `memory_ratio` is what learning adds to the peak memory of a process, over its
tables.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from invdist.bench._steps import Driver, forget_peak, memory_mb, on_ranks, random_batches
from invdist.data.stream.exposures import BATCH_ROWS
from invdist.embeddings.row_optimizers import NoOptimizer
from invdist.embeddings.shared_memory import connect
from invdist.embeddings.store import EmbeddingStore
from invdist.embeddings.tables import Table, shard_tables
from invdist.learning.exposure_vectors import PADDING, SubspaceIteration, count_pairs, iteration_columns
from invdist.models.build import ModelSpec, build_recommender
from invdist.runtime.errors import UserError

_STEPS = 5
_BATCHES = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `invdist bench vectors`; the defaults are the tables of Micro Video."""
    parser.add_argument("--world-size", type=int, default=1, help="processes on this machine")
    parser.add_argument("--users", type=int, default=37_692)
    parser.add_argument("--items", type=int, default=131_690)
    parser.add_argument("--dim", type=int, default=32, help="k of the plain step's model")
    parser.add_argument("--batch", type=int, default=8192, help="labeled interactions per rank and plain step")
    parser.add_argument("--learned", type=int, default=64, help="columns of vectors that are learned")
    parser.add_argument("--repeats", type=int, default=11, help="medians are over this many turns of each")


def run(args: argparse.Namespace) -> dict[str, object]:
    """Measures both in one run. Times are medians of CPU time on the first rank."""
    sizes = {name: getattr(args, name) for name in ("users", "items", "dim", "batch", "learned", "repeats")}
    for name, value in {**sizes, "world-size": args.world_size}.items():
        if value < 1:
            raise UserError(f"--{name} must be at least 1, not {value}")
    if args.dim % 4 or args.learned % 4:
        raise UserError("--dim and --learned must be multiples of 4, as FBGEMM needs")
    first = on_ranks(_measure, args.world_size, args.world_size, sizes)[0]
    ratios = {
        "ratio": first["exposure_us"] / first["plain_row_us"],
        "memory_ratio": first["grown_mb"] / first["tables_mb"],
    }
    return {"world_size": args.world_size, **sizes, **first, **ratios}


def _measure(rank: int, ranks: int, sizes: dict[str, int]) -> dict[str, float]:
    users, items, dim, batch = (sizes[name] for name in ("users", "items", "dim", "batch"))
    comm, device = connect(), torch.device("cpu")
    spec = ModelSpec(users=users, items=items, dim=dim, batch_size=batch * ranks, sharding="row_wise")
    plain = Driver(build_recommender(spec, device, comm), "none", 0, random_batches(users, items, batch, rank=rank))
    plain(_STEPS)
    before = memory_mb("VmRSS")
    forget_peak()

    def store_of(columns: int) -> EmbeddingStore:
        tables = tuple(Table(name, rows, columns) for name, rows in (("user", users), ("item", items)))
        placed = shard_tables(tables, "row_wise", device=device, batch_size=batch, hbm_gb=1, ddr_gb=1024)
        return EmbeddingStore(placed, comm, lambda local_rows, store: NoOptimizer())

    store = store_of(iteration_columns(sizes["learned"]))
    iteration = SubspaceIteration(store, sizes["learned"])
    source = np.random.default_rng(rank)
    pairs = [
        (source.integers(users, size=BATCH_ROWS), source.integers(items, size=BATCH_ROWS)) for _ in range(_BATCHES)
    ]
    iteration.start(count_pairs(store_of(PADDING), pairs, pairs[:1]), seed=0)
    seconds: dict[str, list[float]] = {"plain": [], "product": [], "orthonormal": []}
    for _ in range(sizes["repeats"]):
        for target in ("user", "item"):
            seconds["plain"].append(_cpu(lambda: plain(_STEPS)) / (_STEPS * batch))
            # The last product is the one that is not made orthonormal.
            of_product = _cpu(lambda target=target: iteration.product(target, pairs, last=True))
            seconds["product"].append(of_product / (_BATCHES * BATCH_ROWS))
            seconds["orthonormal"].append(_cpu(lambda target=target: iteration.orthonormalise(target)))
    return {
        "plain_row_us": 1e6 * statistics.median(seconds["plain"]),
        "exposure_us": 1e6 * statistics.median(seconds["product"]),
        "orthonormal_ms": 1e3 * statistics.median(seconds["orthonormal"]),
        "tables_mb": store.local_rows.nbytes / 2**20,
        "grown_mb": memory_mb("VmHWM") - before,
    }


def _cpu(work: Callable[[], object]) -> float:
    """Seconds of CPU time of this process: other load on the machine hardly changes them."""
    started = time.process_time()
    work()
    return time.process_time() - started
