"""Layouts and routes of 64 and 1,024 ranks, seen from one of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from invdist.embeddings.exchange import Exchange, Pairs
from invdist.embeddings.locate import RowLocator
from invdist.embeddings.tables import Layout, Table, shard_tables
from tests.embeddings.loopback import LoopbackComm, batch
from tests.embeddings.many_ranks import fake_ranks
from tests.embeddings.sharded import SHARDINGS

USERS, ITEMS, COLUMNS = 5000, 7001, 32
CPU = torch.device("cpu")


def _layout(sharding: Any, ranks: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Layout, torch.Tensor]:
    tables = (Table("user", USERS, COLUMNS), Table("item", ITEMS, COLUMNS))
    with fake_ranks(ranks, 0, monkeypatch):
        sharded = shard_tables(tables, sharding, device=CPU, batch_size=1024, hbm_gb=0, ddr_gb=64)
    return sharded.layout, sharded.local_rows


@pytest.mark.parametrize("ranks", [64, 1024])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_every_row_is_found_at_its_owner(sharding: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shards cover each table once (replicated: on every rank), and the route of an id leads to its shard."""
    kinds: dict[str, str] = dict(zip(("user", "item"), sharding.split("/") * 2, strict=False))
    layout, local_rows = _layout(kinds, ranks, monkeypatch)
    assert len(local_rows) == sum(shard.rows for shard in layout.on(0))
    assert local_rows.shape[1] == layout.width
    for table in layout.tables:
        shards, copies = layout.of(table.name), ranks if kinds[table.name] == "data_parallel" else 1
        assert sum(shard.rows * shard.columns for shard in shards) == copies * table.rows * table.columns
    locate = RowLocator(layout, ranks, CPU)
    pairs = Pairs(torch.tensor([0, 77, USERS - 1]), torch.tensor([1, 5000, ITEMS - 1]))
    keys = locate(pairs).view(-1, locate.pieces)
    for row, (table, number) in enumerate(
        [(name, int(i)) for name, ids in zip(("user", "item"), pairs, strict=True) for i in ids]
    ):
        for piece, key in enumerate(keys[row].tolist()):
            owner, local = divmod(key, locate.stride)
            (shard,) = [s for s in layout.on(owner) if s.table == table and s.base <= local < s.base + s.rows]
            assert shard.row + local - shard.base == number
            assert shard.column == piece * layout.width


@pytest.mark.parametrize("ranks", [8, 64, 1024])
@pytest.mark.parametrize("sharding", ["row_wise", {"user": "row_wise", "item": "data_parallel"}])
def test_the_exchange_has_no_operators_per_rank(sharding: Any, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of operators of an exchange does not depend on the number of ranks, and the host reads once."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        names: list[str]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    layout, _ = _layout(sharding, ranks, monkeypatch)
    rows, comm, count = batch(256, 1, CPU, users=USERS, items=ITEMS), LoopbackComm(ranks, CPU), Count()
    count.names = []
    locate = RowLocator(layout, ranks, CPU)
    groups = [Pairs(rows.user, rows.item), Pairs(rows.unlabeled_user, rows.unlabeled_item)]  # pyright: ignore
    with count:
        Exchange(locate, comm, groups).advance().finish()
    assert comm.host_reads == 1
    assert len(count.names) < (150 if sharding == "row_wise" else 200)
    assert not [name for name in count.names if "bincount" in name or "_local_scalar_dense" in name]
