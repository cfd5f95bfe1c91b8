"""Where tables go: TorchRec's planner with the choices of this engine, for a run and for `invdist plan` alike.

Needs no device and no process group: the planner works on the description of the ranks (a TorchRec `Topology`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from invdist.embeddings.torchrec_internals import stats_lines

Sharding = Literal["auto", "row_wise", "table_wise", "column_wise", "data_parallel"]
SHARDINGS: tuple[str, ...] = get_args(Sharding)
Memory = Literal["device", "uvm", "auto"]
MEMORIES: tuple[str, ...] = get_args(Memory)
_KERNELS = {"device": "fused", "uvm": "fused_uvm"}
GIB = 1 << 30
_CARD_RESERVE = 0.1


@dataclass(frozen=True, slots=True)
class Table:
    """Name and size of an embedding table."""

    name: str
    rows: int
    columns: int


class DoesNotFit(Exception):
    """The planner finds no way to place the tables in the memory of the ranks."""


@dataclass(frozen=True)
class Placement:
    """The planner's decision, and what it reported about it."""

    plan: Any
    """TorchRec's `ShardingPlan`."""
    report: dict[str, Any]
    """What the planner passes to a statistics printer: `best_plan` holds the priced options it chose."""
    memory: str = "device"
    """Where the tables are: `device`, or `uvm`."""

    def describe(self) -> str:
        """TorchRec's own text (`EmbeddingStats`) without its frame, blank lines and 300 columns of padding."""
        from torchrec.distributed.planner.stats import EmbeddingStats

        stats = EmbeddingStats()
        with quiet_torchrec():
            stats.log(**self.report)
        lines = (re.sub(r" {2,}", "  ", line.strip("# ")) for line in stats_lines(stats))
        return "\n".join(line for line in lines if line.strip("- "))


def make_collection(tables: Sequence[Table], optimizer: type[torch.optim.Optimizer] | None = None) -> Any:
    """A TorchRec `EmbeddingCollection` of these tables that holds no memory yet.

    With an `optimizer` the planner counts its state beside the rows.
    """
    import torchrec

    collection = torchrec.EmbeddingCollection(
        tables=[
            torchrec.EmbeddingConfig(
                name=table.name,
                num_embeddings=table.rows,
                embedding_dim=table.columns,
                feature_names=[table.name],
                # TorchRec would draw random rows here. The recommender draws its own and overwrites them.
                init_fn=_leave_as_is,
            )
            for table in tables
        ],
        device=torch.device("meta"),
    )
    if optimizer is not None:
        for parameter in collection.parameters():
            # Where the planner looks for it.
            parameter._optimizer_classes = [optimizer]  # pyright: ignore[reportAttributeAccessIssue]
    return collection


def sharders() -> list[Any]:
    """The TorchRec sharders of a collection."""
    from torchrec.distributed.embedding import EmbeddingCollectionSharder

    return [EmbeddingCollectionSharder()]


def memory_caps(
    hbm_gb: float, ddr_gb: float, *, local_ranks: int, card: int | None, taken: int = 0, host_taken: int = 0
) -> tuple[int, int]:
    """Bytes of device memory and of host memory that one rank may fill with tables and their optimizer state.

    `hbm_gb` is for one GPU, `ddr_gb` for one host, whose `local_ranks` get equal shares of it. `card` is the memory of
    this rank's GPU in bytes, None without one: a rank then has no device memory. A tenth of a card is left to batches,
    candidates and NCCL, whatever `hbm_gb` says. `taken` bytes are in use already by other tables of this rank: on the
    GPU if there is one, and `host_taken` in unified memory.
    """
    host = max(0, int(ddr_gb * GIB / local_ranks) - host_taken)
    if card is None:
        return 0, max(0, host - taken)
    return max(0, int(min(hbm_gb * GIB, card * (1 - _CARD_RESERVE))) - taken), host


def sharding_by_table(tables: Sequence[Table], sharding: str | Mapping[str, str]) -> dict[str, str]:
    """The sharding of each table, from one for all or one for each by name."""
    return {table.name: sharding if isinstance(sharding, str) else sharding[table.name] for table in tables}


def place_tables(
    collection: Any,
    tables: Sequence[Table],
    sharding: str | Mapping[str, str],
    topology: Any,
    *,
    batch_size: int,
    reserve: float,
    memory: str = "device",
) -> Placement:
    """Plans `collection` (of `tables`) for the ranks of a TorchRec `topology`; raises `DoesNotFit`.

    `sharding` is one for all tables or one for each by name; `auto` lets the planner choose row-wise or table-wise.
    `batch_size` is per rank, `reserve` the share of the topology's memory that is left free. `memory` matters on GPUs:
    with `auto` the tables are in unified memory if they do not fit the devices. All of them or none: the local rows of
    a rank are one matrix.
    """
    shardings = sharding_by_table(tables, sharding)
    on_device = topology.compute_device == "cpu" or "data_parallel" in shardings.values()
    if memory == "auto" and not on_device:
        with contextlib.suppress(DoesNotFit):
            return place_tables(collection, tables, shardings, topology, batch_size=batch_size, reserve=reserve)
    memory = "device" if on_device or memory == "device" else "uvm"
    from torchrec.distributed.planner import EmbeddingShardingPlanner
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
    from torchrec.distributed.planner.types import ParameterConstraints, PlannerError

    report = _Report()
    # A plan that does not fit is logged as an error; the caller explains it.
    with quiet_torchrec(logging.ERROR):
        planner = EmbeddingShardingPlanner(
            topology=topology,
            batch_size=batch_size,
            constraints={
                table.name: ParameterConstraints(
                    sharding_types=["row_wise", "table_wise"] if kind == "auto" else [kind],
                    compute_kernels=["dense" if kind == "data_parallel" else _KERNELS[memory]],
                    min_partition=column_width(table.columns, topology.world_size),
                )
                for table, kind in zip(tables, shardings.values(), strict=True)
            },
            storage_reservation=FixedPercentageStorageReservation(percentage=reserve),
            stats=report,  # pyright: ignore[reportArgumentType]
        )
        try:
            plan = planner.plan(collection, sharders())
        except PlannerError as error:
            raise DoesNotFit from error
    return Placement(plan, report.values, memory)


def spread_multiplier(rows: int) -> int:
    """The `m` that makes `id * m % rows` spread consecutive ids evenly: coprime to `rows`, next to its golden section.

    So no two ids share a place, whatever range of ids is popular, and its inverse is another multiplication.
    """
    multiplier = max(1, round(rows * (math.sqrt(5) - 1) / 2))
    while math.gcd(multiplier, rows) > 1:
        multiplier -= 1
    return multiplier


def ids_at(first: int, end: int, rows: int, multiplier: int) -> Tensor:
    """The ids of the rows at places `[first, end)` of a table of `rows` rows."""
    back = pow(multiplier, -1, rows) if rows > 1 else 1
    return torch.arange(first, end) * back % max(1, rows)


def column_width(columns: int, world_size: int) -> int:
    """The narrowest column shard: one per rank, a multiple of 4 as FBGEMM needs, dividing the columns evenly."""
    widths = [w for w in range(4, columns + 1, 4) if columns % w == 0 and w * world_size >= columns]
    return widths[0] if widths else columns


@contextlib.contextmanager
def quiet_torchrec(level: int = logging.WARNING) -> Iterator[None]:
    """Silences logging up to `level` and warnings: TorchRec logs each plan and module, and warns of its defaults."""
    previous = logging.root.manager.disable
    logging.disable(level)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


class _Report:
    """Takes the place of the planner's statistics printer and keeps what it would print."""

    values: dict[str, Any]

    def log(self, **values: Any) -> None:
        self.values = values


def _leave_as_is(weight: Tensor) -> None:
    del weight
