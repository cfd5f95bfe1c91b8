"""Sharded tables, planned and allocated by TorchRec.

TorchRec decides where each part of a table lives and allocates it there. No rank holds a table it does not own.
The rest of the package sees `local_rows`, one matrix per rank with all of its shards one below the other, and a
`Layout`, which says which local row a table row is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from invdist.embeddings.placement import (
    GIB,
    SHARDINGS,
    DoesNotFit,
    Memory,
    Sharding,
    Table,
    make_collection,
    memory_caps,
    place_tables,
    quiet_torchrec,
    sharders,
    sharding_by_table,
    spread_multiplier,
)
from invdist.embeddings.torchrec_internals import place_on_devices, shard_weights, sharding_types
from invdist.runtime.errors import UserError


@dataclass(frozen=True, slots=True)
class Shard:
    """A rectangle of a table on one rank, and its first local row there (`base`).

    Rows are counted by place: see `Layout.multipliers`.
    """

    table: str
    rank: int
    row: int
    rows: int
    column: int
    columns: int
    base: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where every part of every table lives. Equal on every rank."""

    tables: tuple[Table, ...]
    shards: tuple[Shard, ...]
    sharding: dict[str, str]
    """The sharding type of each table."""
    width: int
    """Columns of a local row: those of a table, or of one column shard."""
    multipliers: dict[str, int] = field(default_factory=dict)
    """Of tables with hashed placement: row `id` of a table of n rows has the place `id * multiplier % n`."""

    @property
    def replicated(self) -> list[str]:
        """The tables that every rank holds whole (data parallel)."""
        return [table.name for table in self.tables if self.sharding[table.name] == "data_parallel"]

    def places_rows_like(self, other: Layout) -> bool:
        """Whether every row has the same owner and the same local row in both, whatever their columns."""
        if self.multipliers != other.multipliers:
            return False
        places = [
            {(s.table, s.rank, s.row, s.rows, s.base) for s in layout.shards} if layout.whole_rows else None
            for layout in (self, other)
        ]
        return places[0] is not None and places[0] == places[1]

    @property
    def whole_rows(self) -> bool:
        """True when no table is cut into columns."""
        return all(shard.columns == self.tables[0].columns for shard in self.shards)

    def of(self, table: str) -> list[Shard]:
        """The shards of one table in order of column, then row."""
        return sorted((s for s in self.shards if s.table == table), key=lambda s: (s.column, s.row, s.rank))

    def on(self, rank: int) -> list[Shard]:
        """The shards of one rank, ordered by local row."""
        return sorted((s for s in self.shards if s.rank == rank), key=lambda s: s.base)

    def describe(self) -> list[dict[str, Any]]:
        """Every table and its shards as plain data, for the events of a run."""
        return [
            {
                "table": table.name,
                "sharding": self.sharding[table.name],
                "rows": table.rows,
                "dim": table.columns,
                "shards": [asdict(shard) for shard in self.of(table.name)],
            }
            for table in self.tables
        ]


@dataclass(frozen=True, slots=True)
class ShardedTables:
    """The tables as TorchRec sharded them: their layout, and the local rows `[rows, width]` of this rank."""

    layout: Layout
    local_rows: Tensor
    stats: str
    """TorchRec's report of the plan (`EmbeddingStats`); only on the first rank, which plans."""


def shard_tables(
    tables: tuple[Table, ...],
    sharding: Sharding | Mapping[str, str],
    *,
    device: torch.device,
    batch_size: int,
    hbm_gb: float,
    ddr_gb: float,
    copies: float = 1.0,
    taken: int = 0,
    host_taken: int = 0,
    memory: Memory = "device",
    hashed: bool = False,
    group: dist.ProcessGroup | None = None,
) -> ShardedTables:
    """Plans and allocates `tables` over the ranks of `group`, with one sharding for all or one for each by name.

    `auto` lets TorchRec's planner choose row-wise or table-wise for each table. `hbm_gb` is for one GPU, `ddr_gb` for
    one host: ranks get what `memory_caps` gives the rank that has least, where `taken` bytes (of unified memory:
    `host_taken`) are in use by other tables. It must hold `copies` times the rows: the rows and their optimizer state.
    A plan that does not fit is a `UserError`. With `memory` `uvm` or `auto` the tables may be in unified memory,
    within `ddr_gb`. `hashed` row-wise tables have popular ids on different ranks.
    """
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.types import ShardingEnv

    group = group or dist.group.WORLD
    assert group is not None
    world_size = dist.get_world_size(group)
    collection, stats = make_collection(tables), ""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    card = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    in_use = {"taken": taken, "host_taken": host_taken}
    mine = (str(device), memory_caps(hbm_gb, ddr_gb, local_ranks=local_ranks, card=card, **in_use))
    of_ranks: list[Any] = [None] * world_size
    dist.all_gather_object(of_ranks, mine, group=group)
    hbm, ddr = (min(caps) for caps in zip(*(caps for _, caps in of_ranks), strict=True))
    with quiet_torchrec():
        topology = Topology(
            world_size=world_size,
            compute_device=device.type,
            local_world_size=local_ranks,
            # The planner knows nothing of our optimizers' state: it gets the share of the rows themselves.
            hbm_cap=int(hbm / copies),
            ddr_cap=int(ddr / copies),
        )
        # Not TorchRec's `collective_plan`: if the first rank finds no plan, the others would wait forever.
        plan: list[Any] = [None]
        if dist.get_rank(group) == 0:
            with contextlib.suppress(DoesNotFit):
                batch_per_rank = max(1, batch_size // world_size)
                placed = place_tables(
                    collection, tables, sharding, topology, batch_size=batch_per_rank, reserve=0.05, memory=memory
                )
                plan, stats = [placed.plan], placed.describe()
        dist.broadcast_object_list(plan, group_src=0, group=group)
        if plan[0] is None:
            host = f"{ddr / GIB:.3g} GB of memory (rows.ddr_gb={ddr_gb:g} for a host, divided by its ranks)"
            card = f"{hbm / GIB:.3g} GB of GPU memory (rows.hbm_gb={hbm_gb:g}, at most nine tenths of the card)"
            of_gpus = {"device": f"{card}, or rows.memory=auto", "uvm": host, "auto": f"{card}, {host}"}
            caps = of_gpus[memory] if device.type == "cuda" else host
            kinds = " and ".join(dict.fromkeys(sharding_by_table(tables, sharding).values()))
            raise UserError(
                f"the tables do not fit {world_size} rank(s) as {kinds}, each with {caps}: use more ranks or hosts, "
                "raise the cap to what the machines have, or choose another rows.sharding "
                f"({', '.join(SHARDINGS)})"
            )
        place_on_devices(plan[0], [name for name, _ in of_ranks])
        model = DistributedModelParallel(
            collection,
            env=ShardingEnv.from_process_group(group),
            device=device,
            plan=plan[0],
            sharders=sharders(),
            init_data_parallel=False,
        )
    layout, local_rows = _read_layout(tables, model.module, dist.get_rank(group), world_size)
    if hashed and world_size > 1:
        cut = [table for table in tables if layout.sharding[table.name] == "row_wise"]
        layout = replace(layout, multipliers={table.name: spread_multiplier(table.rows) for table in cut})
    return ShardedTables(layout, local_rows.to(device), stats)


def _read_layout(tables: tuple[Table, ...], module: Any, rank: int, world_size: int) -> tuple[Layout, Tensor]:
    """The layout of a sharded module, and one matrix over the memory of this rank's shards."""
    plan = module.module_sharding_plan
    sharding = {name: parameter.sharding_type for name, parameter in plan.items()}
    order: list[tuple[str, int, int, int, int, int]] = []  # table, rank, row, rows, column, columns
    for table in tables:
        parameter = plan[table.name]
        if parameter.sharding_type == "data_parallel":
            order += [(table.name, r, 0, table.rows, 0, table.columns) for r in range(world_size)]
        else:
            for shard in parameter.sharding_spec.shards:
                (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
                order.append((table.name, shard.placement.rank(), row, rows, column, columns))
    widths = {columns for *_, columns in order}
    if len(widths) != 1:
        raise UserError(f"column shards must be equally wide, the plan has widths {sorted(widths)}: change rows.dim")

    # Shards lie in memory in the order of sharding types, then of tables.
    kinds = sharding_types(module)
    order.sort(key=lambda s: kinds.index(sharding[s[0]]))
    bases = dict.fromkeys(range(world_size), 0)
    shards: list[Shard] = []
    for name, owner, row, rows, column, columns in order:
        shards.append(Shard(name, owner, row, rows, column, columns, bases[owner]))
        bases[owner] += rows
    layout = Layout(tables, tuple(shards), sharding, widths.pop())
    return layout, _local_rows(layout, module, rank)


def _local_rows(layout: Layout, module: Any, rank: int) -> Tensor:
    """One matrix over the memory of all local shards, which it keeps alive. A copy if they are not contiguous."""
    weights = [weight for weight in shard_weights(module) if weight.numel()]
    mine = [shard for shard in layout.on(rank) if shard.rows]
    assert [tuple(w.shape) for w in weights] == [(s.rows, s.columns) for s in mine], "FBGEMM's order of shards"
    if not weights:
        return torch.empty((0, layout.width))
    first, step = weights[0], layout.width * weights[0].element_size()
    ends = [w.data_ptr() + w.shape[0] * step for w in weights]
    if [w.data_ptr() for w in weights[1:]] == ends[:-1] and all(w.is_contiguous() for w in weights):
        total = sum(w.shape[0] for w in weights)
        return first.as_strided((total, layout.width), (layout.width, 1))
    return torch.cat(weights)
