"""The estimate for one job: TorchRec's planner and this engine's formulas together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from invdist.embeddings.placement import GIB, DoesNotFit
from invdist.planning import formulas
from invdist.planning.formulas import StepTraffic
from invdist.planning.job import FLOAT, ID, Job
from invdist.planning.planner import Plan, make_plan
from invdist.runtime.errors import UserError

_CHECKED_RANKS = 2048
"""Suggested numbers of GPUs up to here are checked with the planner, whose time grows with them."""

_LIMITS = {
    "launch": "launching operators (batches are small: more rows per step cost almost nothing)",
    "memory": "memory bandwidth",
    "host_link": "the link to the host's memory, where the tables are",
    "compute": "arithmetic of the tower",
    "intra_link": "the links inside a node",
    "inter_link": "the links between nodes",
    "latency": "the start of collectives (more GPUs will not make a step shorter)",
}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step by what they are spent on, if nothing overlaps."""

    launch: float
    memory: float
    host_link: float
    compute: float
    intra_link: float
    inter_link: float
    latency: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(vars(self).values())

    @property
    def limit(self) -> str:
        """What takes most."""
        return max(vars(self), key=lambda name: vars(self)[name])


@dataclass(frozen=True)
class Estimate:
    """What a job would take; bytes are those of the fullest device or the busiest rank."""

    job: Job
    plan: Plan
    vectors: float
    dense: float
    working: float
    ig_added: float
    plain_traffic: StepTraffic
    ig_traffic: StepTraffic
    plain_step: StepTime
    ig_step: StepTime
    largest_users: int
    """Users that would fit with these items."""

    @property
    def device_bytes(self) -> float:
        """Everything an `ig` run keeps on the fullest device."""
        return self.plan.total + self.vectors + self.dense + self.working + self.ig_added

    @property
    def epoch_s(self) -> tuple[float, float] | None:
        """Seconds of an epoch of `none` and of `ig`, if the number of interactions is known."""
        rows, batch = self.job.rows, self.job.batch
        if rows is None:
            return None
        plain, inverse = formulas.epoch_steps(rows, batch, self.job.test_share)
        none = math.ceil(rows / batch) * self.plain_step.total
        return none, plain * self.plain_step.total + inverse * self.ig_step.total

    @property
    def limit(self) -> str:
        """What limits the job, in one sentence."""
        full = self.device_bytes / self.job.usable
        return f"time: {_LIMITS[self.ig_step.limit]}; memory: {full:.0%} of what a device can give"

    def values(self) -> dict[str, Any]:
        """The whole estimate as JSON-able values, in bytes and seconds."""
        epoch = self.epoch_s
        return {
            "request": asdict(self.job),
            "tables": [asdict(table) for table in self.plan.tables],
            "device_bytes": {
                "rows": self.plan.rows,
                "optimizer_state": self.plan.state,
                "exchange_buffers": self.plan.buffers,
                "exposure_vectors": self.vectors,
                "dense": self.dense,
                "working": self.working,
                "ig_added": self.ig_added,
                "total": self.device_bytes,
                "usable": self.job.usable,
            },
            "host_bytes_per_gpu": self.plan.host,
            "bytes_per_step": {
                "plain": asdict(self.plain_traffic) | {"total": self.plain_traffic.total},
                "ig": asdict(self.ig_traffic) | {"total": self.ig_traffic.total},
            },
            "step_seconds": {
                "plain": asdict(self.plain_step) | {"total": self.plain_step.total},
                "ig": asdict(self.ig_step) | {"total": self.ig_step.total},
                "planner_fused": self.plan.fused_step_s,
            },
            "epoch_seconds": {"none": epoch[0], "ig": epoch[1]} if epoch else None,
            "largest_users": self.largest_users,
            "limit": {"step": self.ig_step.limit, "text": self.limit},
        }


def estimate(job: Job) -> Estimate:
    """Plans one job. Raises `UserError` if it does not fit, with the number of GPUs that would be enough."""
    job.check()
    try:
        plan = make_plan(job, _for_tables(job) - formulas.vectors_bytes(job))
    except DoesNotFit:
        raise UserError(_too_large(job)) from None
    plain = formulas.busiest(job, plan.tables, inverse_gradient=False)
    inverse = formulas.busiest(job, plan.tables, inverse_gradient=True)
    return Estimate(
        job=job,
        plan=plan,
        vectors=formulas.vectors_bytes(job),
        dense=formulas.dense_bytes(job),
        working=formulas.plain_working_bytes(job),
        ig_added=formulas.ig_added_bytes(job),
        plain_traffic=plain,
        ig_traffic=inverse,
        plain_step=step_time(job, plain, inverse_gradient=False, on_host=plan.host > 0),
        ig_step=step_time(job, inverse, inverse_gradient=True, on_host=plan.host > 0),
        largest_users=largest_users(job),
    )


def sweep(
    job: Job, name: str, values: Sequence[int], batch_per_gpu: int | None = None
) -> list[tuple[int, Estimate | UserError]]:
    """Each value of one field with the estimate for it, or with the error if it does not fit.

    With `batch_per_gpu` the batch grows with the number of GPUs.
    """
    results: list[tuple[int, Estimate | UserError]] = []
    for value in values:
        changed = replace(job, **{name: value})
        if batch_per_gpu:
            changed = replace(changed, batch=batch_per_gpu * changed.gpus)
        try:
            results.append((value, estimate(changed)))
        except UserError as error:
            results.append((value, error))
    return results


def step_time(job: Job, traffic: StepTraffic, inverse_gradient: bool, on_host: bool = False) -> StepTime:
    """Our estimate of a step: each part by its own formula. `on_host`: tables are in unified memory."""
    hardware = job.hardware
    operators = formulas.IG_OPERATORS if inverse_gradient else formulas.PLAIN_OPERATORS
    peers = (traffic.all_to_alls + traffic.all_gathers) * (job.gpus - 1)
    return StepTime(
        launch=operators * hardware.operator_s,
        memory=formulas.memory_traffic(job, inverse_gradient) / hardware.memory,
        host_link=formulas.table_traffic(job, inverse_gradient) / hardware.host_link if on_host else 0.0,
        compute=formulas.operations(job, inverse_gradient) / hardware.flops,
        intra_link=traffic.total * job.near / hardware.intra,
        inter_link=traffic.total * (1 - job.near) / hardware.inter,
        latency=traffic.collectives * hardware.collective_s + peers * hardware.peer_s,
    )


def largest_users(job: Job) -> int:
    """The most users whose table fits beside the items, row-wise: in closed form, then checked with the planner."""
    per_device = math.floor(_room(job) / job.row_bytes) - -(-job.items // job.gpus)
    users = max(0, per_device * job.gpus)
    while users > 0 and job.gpus <= _CHECKED_RANKS and not _fits(replace(job, users=users)):
        users -= max(job.gpus, users // 1000)
    return max(0, users)


def smallest_gpus(job: Job) -> int | None:
    """The fewest GPUs that hold these tables row-wise, or None if no number would."""
    # Tables and batch are shared by the GPUs: one GPU alone would need at least this many times its memory.
    alone = replace(job, gpus=1)
    tables = (job.users + job.items) * job.row_bytes
    if job.tables == "device":
        low = math.floor(1 + (tables + _exchange_bytes(alone) - _for_tables(alone)) / job.usable)
    else:
        low = math.floor(tables / _room(replace(job, gpus=job.hardware.gpus_per_node)))
    low = max(1, low)
    for gpus in range(low, min(job.batch, 2 * low + 64) + 1):
        trial = replace(job, gpus=gpus)
        rows = -(-job.users // gpus) + -(-job.items // gpus)
        if rows * job.row_bytes > _room(trial):
            continue
        if gpus > _CHECKED_RANKS or _fits(trial):
            return gpus
    return None


def _fits(job: Job) -> bool:
    try:
        make_plan(replace(job, sharding="row_wise", item_sharding=None), _for_tables(job) - formulas.vectors_bytes(job))
    except DoesNotFit:
        return False
    return True


def _for_tables(job: Job) -> float:
    """Bytes of a device that the planner may use: the rest is what a step of the engine works in."""
    return job.usable - formulas.working_bytes(job)


def _room(job: Job) -> float:
    """Bytes that the rows and state of one rank may take, where `--tables` says."""
    device = _for_tables(job) - _exchange_bytes(job)
    host = job.hardware.ddr / min(job.gpus, job.hardware.gpus_per_node)
    return {"device": device, "uvm": host, "auto": max(device, host)}[job.tables]


def _exchange_bytes(job: Job) -> float:
    """The planner's own buffers, row-wise: ids and rows of one exchange of two tables."""
    return 2 * job.pairs * (ID + job.backbone.columns * FLOAT)


def _too_large(job: Job) -> str:
    tables = (job.users + job.items) * job.row_bytes
    step = formulas.working_bytes(job) + _exchange_bytes(job)
    text = (
        f"does not fit: {job.users:,} users and {job.items:,} items of {job.backbone.columns} columns with "
        f"{job.optimizer} state take {tables / GIB:,.1f} GiB, a step {step / GIB:,.1f} GiB per GPU, "
        f"and {job.gpus:,} GPUs give {job.gpus * job.usable / GIB:,.1f} GiB"
    )
    if job.tables != "device":
        text += f" and their nodes {job.gpus * _room(replace(job, tables='uvm')) / GIB:,.1f} GiB"
    enough = smallest_gpus(job)
    if enough is None:
        return f"{text}. No number of GPUs is enough: the step alone is too large, lower --batch or --rate"
    if enough <= job.gpus:
        return f"{text}. They would fit row-wise, not as {' and '.join(dict.fromkeys(job.shardings.values()))}"
    return f"{text}. At least {enough:,} GPUs are needed (row-wise)"
