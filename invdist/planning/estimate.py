"""One plan for one cluster: TorchRec's planner and this engine's formulas together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from invdist.config.registry import BACKBONES
from invdist.planning import formulas
from invdist.planning.formulas import Job, Traffic
from invdist.planning.planner import GIB, DoesNotFit, Hardware, Plan, make_plan
from invdist.runtime.errors import UserError

_CHECKED_RANKS = 2048
"""Up to here a suggested number of GPUs is put to the planner, whose time grows with it."""


@dataclass(frozen=True)
class Request:
    """What `invdist plan` is asked."""

    users: int
    items: int
    dim: int = 32
    gpus: int = 8
    batch: int = 65_536
    model: str = "gmf"
    rate: int = 1
    candidates: int = 3
    optimizer: str = "adam"
    sharding: str = "auto"
    rows: int | None = None
    """Labeled training rows; None: no epoch time."""
    test_share: float = 0.1
    hardware: Hardware = field(default_factory=Hardware)

    def check(self) -> None:
        """Raises `UserError` on what cannot be."""
        for name in ("users", "items", "dim", "gpus", "batch", "rate"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} must be at least 1, not {getattr(self, name)}")
        if self.candidates < 2:
            raise UserError(f"--candidates must be at least 2 (pass and another), not {self.candidates}")
        if self.dim % 4:
            raise UserError(f"--dim must be a multiple of 4, as FBGEMM wants, not {self.dim}")
        if self.batch < self.gpus:
            raise UserError(
                f"--batch is rows per step over all GPUs: {self.batch:,} leaves some of {self.gpus:,} GPUs without work"
            )
        if self.rows is not None and self.rows < 1:
            raise UserError(f"--rows must be at least 1, not {self.rows}")
        if not 0 < self.test_share < 1:
            raise UserError(f"--test-share must lie between 0 and 1, not {self.test_share:g}")

    @property
    def job(self) -> Job:
        """The same for the formulas."""
        columns, dense, saved = backbone_size(self.model, self.dim)
        return Job(
            users=self.users,
            items=self.items,
            columns=columns,
            dense=dense,
            saved=saved,
            batch=self.batch,
            ranks=self.gpus,
            rate=self.rate,
            candidates=self.candidates,
            optimizer=self.optimizer,
        )


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step by what they are spent on, as if nothing overlapped."""

    launch: float
    memory: float
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
    """The answer; bytes are those of the fullest device or the busiest rank."""

    request: Request
    plan: Plan
    usable: float
    """Bytes of a device after the reserve."""
    dense: float
    working: float
    ig_added: float
    plain_traffic: Traffic
    ig_traffic: Traffic
    plain_step: StepTime
    ig_step: StepTime
    largest_users: int
    """Users that would fit with these items."""

    @property
    def device_bytes(self) -> float:
        """Everything an `ig` run keeps on the fullest device."""
        return self.plan.total + self.dense + self.working + self.ig_added

    @property
    def epoch_s(self) -> tuple[float, float] | None:
        """Seconds of an epoch of `none` and of `ig`, if the number of rows is known."""
        if self.request.rows is None:
            return None
        rows, batch = self.request.rows, self.request.batch
        plain, inverse = formulas.epoch_steps(rows, batch, self.request.test_share)
        none = math.ceil(rows / batch) * self.plain_step.total
        return none, plain * self.plain_step.total + inverse * self.ig_step.total

    @property
    def limit(self) -> str:
        """Where the limit is, in one sentence."""
        full = self.device_bytes / self.usable
        names = {
            "launch": "launching operators (batches are small: more rows per step cost almost nothing)",
            "memory": "memory bandwidth",
            "compute": "arithmetic of the tower",
            "intra_link": "the links inside a node",
            "inter_link": "the links between nodes",
            "latency": "the start of collectives (more GPUs will not make a step shorter)",
        }
        return f"time: {names[self.ig_step.limit]}; memory: {full:.0%} of what a device can give"


def estimate(request: Request) -> Estimate:
    """Plans one run. Raises `UserError` if it does not fit, with the number of GPUs that would do."""
    request.check()
    job = request.job
    try:
        plan = _plan(request)
    except DoesNotFit:
        raise UserError(_why_not(request)) from None
    spreads = [table.spread for table in plan.tables]
    plain = formulas.busiest(job, spreads, inverse_gradient=False)
    inverse = formulas.busiest(job, spreads, inverse_gradient=True)
    return Estimate(
        request=request,
        plan=plan,
        usable=_usable(request),
        dense=formulas.dense_bytes(job),
        working=formulas.plain_working_bytes(job),
        ig_added=formulas.ig_added_bytes(job),
        plain_traffic=plain,
        ig_traffic=inverse,
        plain_step=step_time(request, plain, inverse_gradient=False),
        ig_step=step_time(request, inverse, inverse_gradient=True),
        largest_users=largest_users(request),
    )


def step_time(request: Request, traffic: Traffic, inverse_gradient: bool) -> StepTime:
    """Our estimate of a step: each part by its own formula, added up."""
    hardware, job, ranks = request.hardware, request.job, request.gpus
    neighbours = min(hardware.gpus_per_node, ranks) - 1
    near = neighbours / (ranks - 1) if ranks > 1 else 1.0
    operators = formulas.IG_OPERATORS if inverse_gradient else formulas.PLAIN_OPERATORS
    return StepTime(
        launch=operators * hardware.operator_s,
        memory=formulas.memory_traffic(job, inverse_gradient) / hardware.memory,
        compute=formulas.operations(job, inverse_gradient) / hardware.flops,
        intra_link=traffic.total * near / hardware.intra,
        inter_link=traffic.total * (1 - near) / hardware.inter,
        latency=(traffic.all_to_alls + traffic.all_reduces) * hardware.collective_s
        + traffic.all_to_alls * (ranks - 1) * hardware.peer_s,
    )


def largest_users(request: Request) -> int:
    """The most users whose table fits beside the items, row-wise: closed form, then put to the planner."""
    job = request.job
    left = _for_tables(request) - _exchange_bytes(job)
    item_rows = -(-request.items // request.gpus)
    per_device = math.floor(left / job.row_bytes) - item_rows
    users = max(0, per_device * request.gpus)
    while users > 0 and request.gpus <= _CHECKED_RANKS:
        try:
            _plan(replace(request, users=users, sharding="row_wise"))
            break
        except DoesNotFit:
            users -= max(request.gpus, users // 1000)
    return max(0, users)


def smallest_gpus(request: Request) -> int | None:
    """The fewest GPUs that hold these tables row-wise, or None if no number would."""
    job = request.job
    # Tables and batch are shared by the GPUs, so that one of them would need no less than this many times what it has.
    alone = replace(request, gpus=1)
    needed = (request.users + request.items) * job.row_bytes + _exchange_bytes(alone.job) - _for_tables(alone)
    low = max(1, math.floor(1 + needed / _usable(request)))
    for gpus in range(low, min(request.batch, 2 * low + 64) + 1):
        trial = replace(request, gpus=gpus, sharding="row_wise")
        rows = -(-request.users // gpus) + -(-request.items // gpus)
        if rows * job.row_bytes + _exchange_bytes(trial.job) > _for_tables(trial):
            continue
        if gpus > _CHECKED_RANKS:
            return gpus
        try:
            _plan(trial)
        except DoesNotFit:
            continue
        return gpus
    return None


def backbone_size(model: str, dim: int) -> tuple[int, int, int]:
    """Columns of a row, dense parameters, and values that the backward pass of a pair keeps beside its rows."""
    if model not in BACKBONES.names():
        raise UserError(f"--model {model} is unknown; there are {', '.join(BACKBONES.names())}")
    pairs = 8
    with torch.device("meta"):
        backbone: Any = BACKBONES.get(model)(dim=dim)
        user, item = (torch.empty(pairs, backbone.columns, requires_grad=True) for _ in range(2))
        parameters = {id(parameter) for parameter in backbone.parameters()}
        kept: list[int] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in parameters and tensor._base is None:
                kept.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            backbone(user, item)
    dense = sum(parameter.numel() for parameter in backbone.parameters())
    return backbone.columns, dense, -(-sum(kept) // pairs)


def _plan(request: Request) -> Plan:
    job = request.job
    return make_plan(
        [("user", request.users), ("item", request.items)],
        job.columns,
        ranks=request.gpus,
        batch=job.pairs,
        hbm=_for_tables(request),
        hardware=request.hardware,
        sharding=request.sharding,
        optimizer=request.optimizer,
    )


def _usable(request: Request) -> float:
    return request.hardware.hbm * (1 - request.hardware.reserve)


def _for_tables(request: Request) -> float:
    """Bytes of a device that are left to the planner: what the engine works in is ours to keep free."""
    job = request.job
    ours = formulas.dense_bytes(job) + formulas.plain_working_bytes(job) + formulas.ig_added_bytes(job)
    return _usable(request) - ours


def _exchange_bytes(job: Job) -> float:
    """The planner's own buffers, row-wise: ids and rows of one exchange of two tables."""
    return 2 * job.pairs * (formulas.ID + job.columns * formulas.FLOAT)


def _why_not(request: Request) -> str:
    job = request.job
    tables = (request.users + request.items) * job.row_bytes
    text = (
        f"does not fit: {request.users:,} users and {request.items:,} items of {job.columns} columns with "
        f"{request.optimizer} state take {tables / GIB:,.1f} GiB, a step {_step_gib(request):,.1f} GiB per GPU, "
        f"and {request.gpus:,} GPUs give {request.gpus * _usable(request) / GIB:,.1f} GiB"
    )
    enough = smallest_gpus(request)
    if enough is not None and enough <= request.gpus:
        return f"{text}. They would fit row-wise, not as --sharding {request.sharding}"
    if enough is not None:
        return f"{text}. The smallest number that would do is {enough:,} (row-wise)"
    return f"{text}. No number of GPUs would do: the step alone is too large, lower --batch, --rate or --candidates"


def _step_gib(request: Request) -> float:
    return (_usable(request) - _for_tables(request) + _exchange_bytes(request.job)) / GIB


def sweep(request: Request, name: str, values: Sequence[int]) -> list[Estimate | UserError]:
    """The same plan for several values of one field; where it does not fit, the error stands in its place."""
    results: list[Estimate | UserError] = []
    for value in values:
        try:
            results.append(estimate(replace(request, **{name: value})))
        except UserError as error:
            results.append(error)
    return results
