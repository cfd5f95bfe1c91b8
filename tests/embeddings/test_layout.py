"""What lies where: no rank holds more than its share, and every sharding type is what it says."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from invdist.embeddings.placement import (
    GIB,
    SHARDINGS,
    DoesNotFit,
    Table,
    make_collection,
    memory_caps,
    place_tables,
    quiet_torchrec,
)
from invdist.embeddings.tables import shard_tables
from invdist.embeddings.torchrec_internals import place_on_devices
from invdist.models.build import build_recommender
from invdist.runtime.errors import UserError
from tests.distributed import run_ranks
from tests.embeddings.many_ranks import fake_ranks
from tests.embeddings.sharded import ITEMS, USERS, small_spec

COLUMNS = 8
MIXED = "row_wise/data_parallel"


def _lay_out(rank: int, ranks: int) -> dict:
    facts = {}
    for sharding in (*SHARDINGS, MIXED):
        model = build_recommender(
            small_spec(sharding=sharding, dim=COLUMNS, optimizer="rowwise_adagrad"), torch.device("cpu")
        )
        layout, local_rows = model.rows.layout, model.rows.local_rows
        shards = [(s.table, s.rank, s.row, s.rows, s.column, s.columns) for s in layout.shards]
        allocated = local_rows.untyped_storage().nbytes() // local_rows.element_size()
        facts[sharding] = (tuple(local_rows.shape), shards, layout.sharding, allocated, model.rows.plan_stats)
    try:
        build_recommender(small_spec(ddr_gb=1e-9), torch.device("cpu"))
        facts["too small"] = ""
    except UserError as error:
        facts["too small"] = str(error)
    return facts


@pytest.fixture(scope="module")
def facts() -> list[dict]:
    return run_ranks(_lay_out, 2)


def test_no_rank_holds_a_whole_table_row_wise(facts: list[dict]) -> None:
    rows = [-(-USERS // 2) + -(-ITEMS // 2), USERS // 2 + ITEMS // 2]
    for rank, of in enumerate(facts):
        shape, _, _, allocated, _ = of["row_wise"]
        assert shape == (rows[rank], COLUMNS)
        assert allocated == rows[rank] * COLUMNS, "nothing is kept beside the local rows"


def test_each_table_is_on_one_rank_table_wise(facts: list[dict]) -> None:
    shapes = {of["table_wise"][0] for of in facts}
    assert shapes == {(USERS, COLUMNS), (ITEMS, COLUMNS)}


def test_each_rank_has_some_columns_of_every_row_column_wise(facts: list[dict]) -> None:
    for of in facts:
        assert of["column_wise"][0] == (USERS + ITEMS, COLUMNS // 2)


def test_every_rank_holds_everything_data_parallel(facts: list[dict]) -> None:
    for of in facts:
        assert of["data_parallel"][0] == (USERS + ITEMS, COLUMNS)


def test_every_rank_holds_all_items_and_some_users(facts: list[dict]) -> None:
    users = [-(-USERS // 2), USERS // 2]
    for rank, of in enumerate(facts):
        shape, shards, kinds, allocated, stats = of[MIXED]
        assert kinds == {"user": "row_wise", "item": "data_parallel"}
        assert shape == (users[rank] + ITEMS, COLUMNS)
        assert allocated == (users[rank] + ITEMS) * COLUMNS, "nothing is kept beside the local rows"
        assert [(rows, row) for table, on, row, rows, *_ in shards if (table, on) == ("item", rank)] == [(ITEMS, 0)]
        assert rank or "data_parallel" in stats.lower() or "dp" in stats.lower()


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_shards_cover_every_table_once_and_ranks_agree(facts: list[dict], sharding: str) -> None:
    assert facts[0][sharding][1:3] == facts[1][sharding][1:3]
    _, shards, kinds, _, stats = facts[0][sharding]
    if sharding == "auto":
        assert set(kinds.values()) <= {"row_wise", "table_wise"}
    else:
        assert set(kinds.values()) == {sharding}
    copies = 2 if sharding == "data_parallel" else 1
    for table, rows in (("user", USERS), ("item", ITEMS)):
        covered = torch.zeros(rows, COLUMNS)
        for name, _, row, count, column, columns in shards:
            if name == table:
                covered[row : row + count, column : column + columns] += 1
        assert (covered == copies).all()
        assert table in stats, "the plan is reported"


def test_tables_that_do_not_fit_are_refused_with_advice(facts: list[dict]) -> None:
    for of in facts:
        assert "do not fit 2 rank(s)" in of["too small"]
        assert "rows.sharding" in of["too small"]


def test_ranks_of_a_host_share_its_memory_and_a_card_is_not_filled() -> None:
    assert memory_caps(32, 128, local_ranks=1, card=None) == (0, 128 * GIB)
    assert memory_caps(32, 128, local_ranks=8, card=None) == (0, 16 * GIB)
    assert memory_caps(32, 128, local_ranks=8, card=80 * GIB) == (32 * GIB, 16 * GIB)
    assert memory_caps(32, 128, local_ranks=8, card=20 * GIB) == (18 * GIB, 16 * GIB), "a tenth is left free"
    assert memory_caps(32, 128, local_ranks=8, card=None, taken=GIB) == (0, 15 * GIB)
    assert memory_caps(32, 128, local_ranks=8, card=20 * GIB, taken=GIB) == (17 * GIB, 16 * GIB)
    assert memory_caps(32, 128, local_ranks=8, card=20 * GIB, taken=19 * GIB) == (0, 16 * GIB)


@pytest.mark.parametrize(("local", "fits"), [("1", True), ("8", False)])
def test_the_share_of_a_rank_reaches_the_planner(local: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank of 1.5 MiB of rows and 1/3 of 8 MiB for them: enough if the host is its own, not if 8 share it."""
    tables = (Table("user", 8 * 1024, 32), Table("item", 4 * 1024, 32))
    with fake_ranks(1, 0, monkeypatch):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        with nullcontext() if fits else pytest.raises(UserError, match=r"do not fit 1 rank\(s\).*rows.ddr_gb"):
            shard_tables(
                tables, "row_wise", device=torch.device("cpu"), batch_size=1, hbm_gb=1, ddr_gb=8 / 1024, copies=3
            )


def test_the_rank_with_least_memory_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = (Table("user", 8 * 1024, 32), Table("item", 4 * 1024, 32))
    with fake_ranks(2, 0, monkeypatch):

        def gather(objects: list[Any], mine: Any, group: Any = None) -> None:
            objects[:] = [mine, (mine[0], (0, 1 << 10))]

        monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
        with pytest.raises(UserError, match=r"do not fit 2 rank\(s\)"):
            shard_tables(tables, "row_wise", device=torch.device("cpu"), batch_size=2, hbm_gb=1, ddr_gb=64)


def test_tables_on_gpus_need_no_memory_of_the_host() -> None:
    """`rows.ddr_gb` is not used there, as its documentation says; device memory is."""
    from torchrec.distributed.planner import Topology

    tables = (Table("user", 8 * 1024, 32), Table("item", 4 * 1024, 32))
    for sharding in SHARDINGS:
        for hbm, fits in ((8 << 20, True), (1 << 10, False)):
            with quiet_torchrec():
                topology = Topology(world_size=2, compute_device="cuda", hbm_cap=hbm, ddr_cap=0)
            with nullcontext() if fits else pytest.raises(DoesNotFit):
                place_tables(make_collection(tables), tables, sharding, topology, batch_size=64, reserve=0.05)


def test_every_rank_is_planned_on_the_device_it_has() -> None:
    """Three ranks on two nodes, one on the first: the planner itself would take all of them for GPU 0."""
    import torchrec
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints

    table = torchrec.EmbeddingConfig(name="user", num_embeddings=300, embedding_dim=8, feature_names=["user"])
    collection = torchrec.EmbeddingCollection(tables=[table], device=torch.device("meta"))
    sharders: list = [EmbeddingCollectionSharder()]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=3, compute_device="cuda", local_world_size=1),
        constraints={"user": ParameterConstraints(sharding_types=["row_wise"])},
    )
    plan: Any = planner.plan(collection, sharders)
    (parameter,) = [parameter for module in plan.plan.values() for parameter in module.values()]

    def placed() -> list[str]:
        return [str(shard.placement) for shard in parameter.sharding_spec.shards]

    assert placed() == ["rank:0/cuda:0", "rank:1/cuda:0", "rank:2/cuda:0"]
    place_on_devices(plan, ["cuda:0", "cuda:0", "cuda:1"])
    assert placed() == ["rank:0/cuda:0", "rank:1/cuda:0", "rank:2/cuda:1"]


@pytest.mark.parametrize(
    ("memory", "hbm", "ddr", "kernel"),
    [
        ("device", 8 << 20, 8 << 20, "fused"),
        ("device", 1 << 19, 8 << 20, None),
        ("uvm", 8 << 20, 8 << 20, "fused_uvm"),
        ("uvm", 8 << 20, 1 << 19, None),
        ("auto", 8 << 20, 8 << 20, "fused"),
        ("auto", 1 << 19, 8 << 20, "fused_uvm"),
        ("auto", 1 << 19, 1 << 19, None),
    ],
)
@pytest.mark.parametrize("sharding", ["row_wise", "table_wise", "column_wise"])
def test_tables_in_unified_memory_take_host_memory_only(
    sharding: str, memory: str, hbm: int, ddr: int, kernel: str | None
) -> None:
    """Two GPUs and 1.5 MiB of rows: what the planner decides, and where it counts the bytes."""
    from torchrec.distributed.planner import Topology

    tables = (Table("user", 8 * 1024, 32), Table("item", 4 * 1024, 32))
    with quiet_torchrec():
        topology = Topology(world_size=2, compute_device="cuda", hbm_cap=hbm, ddr_cap=ddr)

    def place() -> Any:
        collection = make_collection(tables)
        return place_tables(collection, tables, sharding, topology, batch_size=64, reserve=0.05, memory=memory)

    if kernel is None:
        with pytest.raises(DoesNotFit):
            place()
        return
    placed = place()
    options = placed.report["best_plan"]
    assert {option.compute_kernel for option in options} == {kernel}
    assert placed.memory == ("uvm" if kernel == "fused_uvm" else "device")
    rows = sum(table.rows * table.columns * 4 for table in tables)
    counted = {kind: sum(getattr(s.storage, kind) for o in options for s in o.shards) for kind in ("hbm", "ddr")}
    where, other = ("ddr", "hbm") if kernel == "fused_uvm" else ("hbm", "ddr")
    assert rows <= counted[where] < 1.1 * rows
    assert counted[other] < 0.1 * rows  # ids and rows of an exchange
    (module,) = placed.plan.plan.values()
    assert {parameter.compute_kernel for parameter in module.values()} == {kernel}


def test_memory_of_a_host_that_unified_tables_share() -> None:
    caps = memory_caps(32, 128, local_ranks=8, card=80 * GIB, taken=GIB, host_taken=2 * GIB)
    assert caps == (31 * GIB, 14 * GIB)


def test_on_a_cpu_unified_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = (Table("user", 64, 8), Table("item", 32, 8))
    with fake_ranks(1, 0, monkeypatch):
        placed = shard_tables(
            tables, "row_wise", device=torch.device("cpu"), batch_size=1, hbm_gb=1, ddr_gb=1, memory="uvm"
        )
    assert placed.local_rows.shape == (96, 8)
