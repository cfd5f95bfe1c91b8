"""TorchRec's planner, asked about GPUs that this machine does not have."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from invdist.embeddings.placement import DoesNotFit, Table, make_collection, place_tables, quiet_torchrec
from invdist.planning.formulas import TableSpread
from invdist.planning.job import Job


@dataclass(frozen=True, kw_only=True)
class TablePlan(TableSpread):
    """The planner's decision on one table."""

    name: str
    rows: int
    shards: int
    largest_shard: tuple[int, int]


@dataclass(frozen=True)
class Plan:
    """What the planner decided and estimated; bytes are those of the fullest device."""

    tables: tuple[TablePlan, ...]
    rows: int
    state: int
    buffers: int
    """Input and output of one exchange."""
    host: int
    """Rows and state in unified memory, for one rank; then `rows` and `state`, of the device, are 0."""
    fused_step_s: float
    """Its estimate of the embedding part of a plain step of TorchRec's own fused engine, slowest device."""

    @property
    def total(self) -> int:
        """All bytes it counts."""
        return self.rows + self.state + self.buffers


def make_plan(job: Job, hbm: float) -> Plan:
    """Plans the tables of a job with `hbm` bytes of each GPU for tables and exchange; raises `DoesNotFit`."""
    from torchrec.distributed.planner import Topology

    if hbm <= 0:
        raise DoesNotFit
    tables = [Table("user", job.users, job.backbone.columns), Table("item", job.items, job.backbone.columns)]
    with quiet_torchrec():
        topology = Topology(
            world_size=job.gpus,
            compute_device="cuda",
            hbm_cap=int(hbm),
            ddr_cap=int(job.hardware.ddr / min(job.gpus, job.hardware.gpus_per_node)),
            local_world_size=min(job.gpus, job.hardware.gpus_per_node),
            hbm_mem_bw=job.hardware.memory / 1000,  # the planner counts in milliseconds
            intra_host_bw=job.hardware.intra / 1000,
            inter_host_bw=job.hardware.inter / 1000,
        )
    collection = make_collection(tables, _optimizer_class(job.optimizer))
    sharding = "row_wise" if job.exposure_dim else job.shardings  # as vectors are: one exchange serves both
    placed = place_tables(collection, tables, sharding, topology, batch_size=job.pairs, reserve=0.0, memory=job.tables)
    return _read(placed.report["best_plan"], tables, job.optimizer)


def _optimizer_class(optimizer: str) -> type[torch.optim.Optimizer]:
    from torchrec.optim import RowWiseAdagrad

    return {"adam": torch.optim.Adam, "sgd": torch.optim.SGD, "rowwise_adagrad": RowWiseAdagrad}[optimizer]


def _read(options: list[Any], tables: list[Table], optimizer: str) -> Plan:
    """The plan in the planner's own options, one for each table."""
    from torchrec.distributed.planner.shard_estimators import _get_optimizer_multipler

    rows, state, everything, seconds, host = (Counter[int]() for _ in range(5))
    planned = []
    by_name = {table.name: table for table in tables}
    for option in options:
        multiplier = _get_optimizer_multipler(_optimizer_class(optimizer), option.tensor.shape)
        for shard in option.shards:
            size = shard.size[0] * shard.size[1] * option.tensor.element_size()
            on_host = option.compute_kernel == "fused_uvm"
            host[shard.rank] += shard.storage.ddr if on_host else 0
            rows[shard.rank] += 0 if on_host else size
            state[shard.rank] += 0 if on_host else round(size * multiplier)
            everything[shard.rank] += shard.storage.hbm
            seconds[shard.rank] += shard.perf.total / 1000
        largest = max((tuple(shard.size) for shard in option.shards), key=lambda size: size[0] * size[1])
        owned = option.sharding_type in ("table_wise", "column_wise")
        planned.append(
            TablePlan(
                name=option.name,
                rows=by_name[option.name].rows,
                columns=by_name[option.name].columns,
                sharding=option.sharding_type,
                owners=tuple(shard.rank for shard in option.shards) if owned else (0,),
                shards=option.num_shards,
                largest_shard=(largest[0], largest[1]),
            )
        )
    fullest = max(everything, key=lambda rank: everything[rank])
    return Plan(
        tables=tuple(planned),
        rows=rows[fullest],
        state=state[fullest],
        buffers=everything[fullest] - rows[fullest] - state[fullest],
        host=max(host.values()),
        fused_step_s=max(seconds.values()),
    )
