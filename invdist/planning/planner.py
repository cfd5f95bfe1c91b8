"""TorchRec's planner for GPUs that are not here: no device and no process group is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from invdist.embeddings.placement import GIB, DoesNotFit, Table, make_collection, place_tables, quiet_torchrec
from invdist.planning.formulas import Spread


@dataclass(frozen=True)
class Hardware:
    """What the GPUs and their links are taken to be. The defaults of bandwidths are TorchRec's own."""

    hbm: float = 80.0 * GIB
    """Bytes of memory of one GPU."""
    reserve: float = 0.1
    """Share of it left to the CUDA context, NCCL and fragmentation."""
    gpus_per_node: int = 8
    intra: float = 600.0 * GIB
    """Bytes per second between GPUs of one node."""
    inter: float = 12.5 * GIB
    """Bytes per second of one GPU to other nodes."""
    memory: float = 897.0 * GIB
    """Bytes per second of a GPU's memory."""
    flops: float = 10e12
    """Floating-point operations per second that the tower really reaches."""
    operator_s: float = 5e-6
    """Seconds to launch one operator."""
    collective_s: float = 20e-6
    """Seconds to start one collective."""
    peer_s: float = 0.5e-6
    """Seconds per rank that an all-to-all talks to."""


@dataclass(frozen=True)
class TablePlan:
    """The planner's decision on one table."""

    name: str
    rows: int
    columns: int
    sharding: str
    shards: int
    largest_shard: tuple[int, int]
    owners: tuple[int, ...]

    @property
    def spread(self) -> Spread:
        """The same, as the formulas want it."""
        return Spread(self.sharding, self.columns, self.owners)


@dataclass(frozen=True)
class Plan:
    """What the planner decided and estimated; bytes are those of the fullest device."""

    tables: tuple[TablePlan, ...]
    rows: int
    state: int
    buffers: int
    """Input and output of one exchange."""
    fused_step_s: float
    """Its estimate of the embedding part of a plain step with its own fused optimizer, slowest device."""

    @property
    def total(self) -> int:
        """All bytes it counts."""
        return self.rows + self.state + self.buffers


def make_plan(
    rows: Sequence[tuple[str, int]],
    columns: int,
    *,
    ranks: int,
    batch: int,
    hbm: float,
    hardware: Hardware,
    sharding: str = "auto",
    optimizer: str = "adam",
) -> Plan:
    """Asks TorchRec's planner, with the sharding choices of this engine, for `ranks` GPUs.

    `rows` are (name, rows) of the tables, `batch` is per rank, `hbm` the bytes of each device that tables and
    exchange may use. Raises `DoesNotFit`.
    """
    from torchrec.distributed.planner import Topology

    if hbm <= 0:
        raise DoesNotFit
    tables = [Table(name, count, columns) for name, count in rows]
    with quiet_torchrec():
        topology = Topology(
            world_size=ranks,
            compute_device="cuda",
            hbm_cap=int(hbm),
            local_world_size=min(ranks, hardware.gpus_per_node),
            hbm_mem_bw=hardware.memory / 1000,  # the planner counts in milliseconds
            intra_host_bw=hardware.intra / 1000,
            inter_host_bw=hardware.inter / 1000,
        )
    collection = make_collection(tables, _optimizer_class(optimizer))
    placed = place_tables(collection, tables, sharding, topology, batch_size=batch, reserve=0.0)
    return _read(placed.report["best_plan"], dict(rows), columns, optimizer)


def _optimizer_class(optimizer: str) -> type[torch.optim.Optimizer]:
    from torchrec.optim import RowWiseAdagrad

    return {"adam": torch.optim.Adam, "sgd": torch.optim.SGD, "rowwise_adagrad": RowWiseAdagrad}[optimizer]


def _read(options: list[Any], rows: dict[str, int], columns: int, optimizer: str) -> Plan:
    from torchrec.distributed.planner.shard_estimators import _get_optimizer_multipler

    row_bytes: dict[int, int] = {}
    state_bytes: dict[int, int] = {}
    all_bytes: dict[int, int] = {}
    seconds: dict[int, float] = {}
    tables = []
    for option in options:
        multiplier = _get_optimizer_multipler(_optimizer_class(optimizer), option.tensor.shape)
        for shard in option.shards:
            size = shard.size[0] * shard.size[1] * option.tensor.element_size()
            row_bytes[shard.rank] = row_bytes.get(shard.rank, 0) + size
            state_bytes[shard.rank] = state_bytes.get(shard.rank, 0) + round(size * multiplier)
            all_bytes[shard.rank] = all_bytes.get(shard.rank, 0) + shard.storage.hbm
            seconds[shard.rank] = seconds.get(shard.rank, 0.0) + shard.perf.total / 1000
        largest = max((tuple(shard.size) for shard in option.shards), key=lambda size: size[0] * size[1])
        tables.append(
            TablePlan(
                name=option.name,
                rows=rows[option.name],
                columns=columns,
                sharding=option.sharding_type,
                shards=option.num_shards,
                largest_shard=(largest[0], largest[1]),
                owners=tuple(shard.rank for shard in option.shards)
                if option.sharding_type in ("table_wise", "column_wise")
                else (0,),
            )
        )
    fullest = max(all_bytes, key=lambda rank: all_bytes[rank])
    return Plan(
        tables=tuple(tables),
        rows=row_bytes[fullest],
        state=state_bytes[fullest],
        buffers=all_bytes[fullest] - row_bytes[fullest] - state_bytes[fullest],
        fused_step_s=max(seconds.values()),
    )
