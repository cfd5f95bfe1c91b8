"""The formulas against what the engine itself counts while it trains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from invdist.planning.formulas import TableSpread, ig_traffic, plain_traffic
from invdist.planning.job import Job
from tests.distributed import run_ranks
from tests.embeddings.sharded import SHARDINGS, sharding_options

RANKS, USERS, ITEMS, DIM, PAIRS, RATE = 2, 48, 48, 32, 24, 2
VECTORS = 8
CANDIDATES = [-3.0, -1.0, 0.0, 1.0]


def _count_bytes(rank: int, ranks: int) -> dict[tuple[str, str], tuple[int, int, list[list[int]]]]:
    """Bytes and collectives of one step of each kind, and the owners of each table's pieces."""
    from invdist.bench.step import random_vectors
    from invdist.config.registry import STRATEGIES
    from invdist.config.schema import ExposuresConfig
    from invdist.data.stream.batches import Batch
    from invdist.embeddings.comm import Comm
    from invdist.learning.strategy import Setting
    from invdist.models.build import ModelSpec, build_recommender

    counted = {}
    # No id repeats, which the formulas assume, and each owner is asked for as many.
    batch = Batch(
        user=torch.arange(PAIRS) * 2,
        item=torch.arange(PAIRS) * 2,
        label=(torch.arange(PAIRS) % 2).float(),
        unlabeled_user=torch.arange(PAIRS * RATE) % USERS,
        unlabeled_item=torch.arange(PAIRS * RATE) % ITEMS,
        global_rows=PAIRS * ranks,
        step=0,
    )
    for sharding in (*SHARDINGS, "vectors"):
        options = sharding_options("row_wise" if sharding == "vectors" else sharding)
        spec = ModelSpec(users=USERS, items=ITEMS, dim=DIM, batch_size=PAIRS * ranks, **options)
        # The messages of a process group, as on a cluster; through shared memory, ids and their counts are one message.
        comm, vectors = Comm(), None
        if sharding == "vectors":
            spec.exposures = ExposuresConfig(vectors=True, dim=VECTORS, learned=VECTORS)
            vectors = random_vectors(USERS, ITEMS, VECTORS, comm, torch.device("cpu"))
        model = build_recommender(spec, torch.device("cpu"), comm, vectors)
        layout = model.rows.layout
        owners = [[shard.rank for shard in layout.of(table)] for table in ("user", "item")]
        for method, phase in (("none", 0), ("ig", 1)):
            options = {"candidates": CANDIDATES} if method == "ig" else {}
            setting = Setting(
                options=STRATEGIES.get(method).Config(**options),
                unlabeled_rate=RATE,
                gamma=1e-3,
                users=USERS,
                items=ITEMS,
            )
            strategy = STRATEGIES.get(method)(setting, model)
            chosen = strategy.phases(setting)[phase]
            before = model.comm.traffic.bytes, model.comm.traffic.collectives
            exchange = model.exchange(*strategy.groups(chosen, batch)).finish()
            strategy.step(chosen, batch, exchange)
            counted[sharding, method] = (
                model.comm.traffic.bytes - before[0],
                model.comm.traffic.collectives - before[1],
                owners,
            )
    return counted


@pytest.fixture(scope="module")
def counted() -> list[dict[tuple[str, str], tuple[int, int, list[list[int]]]]]:
    return run_ranks(_count_bytes, RANKS)


@pytest.mark.parametrize("method", ["none", "ig"])
@pytest.mark.parametrize("sharding", [*SHARDINGS, "vectors"])
def test_the_engine_sends_what_the_formula_says(counted: list, sharding: str, method: str) -> None:
    job = Job(users=USERS, items=ITEMS, dim=DIM, batch=PAIRS * RANKS, gpus=RANKS, rate=RATE, candidates=len(CANDIDATES))
    job = replace(job, exposure_dim=VECTORS if sharding == "vectors" else 0)
    for rank, by_kind in enumerate(counted):
        sent, collectives, owners = by_kind[sharding, method]
        kinds = ["row_wise"] * 2 if sharding == "vectors" else (sharding.split("/") * 2)[:2]
        spreads = [
            TableSpread(sharding=kind, columns=job.backbone.columns, owners=tuple(table))
            for kind, table in zip(kinds, owners, strict=True)
        ]
        expected = (ig_traffic if method == "ig" else plain_traffic)(job, spreads, rank)
        # The engine rounds each all-reduce down to whole bytes.
        assert sent == pytest.approx(expected.total, abs=3), f"rank {rank}"
        assert collectives == expected.collectives
