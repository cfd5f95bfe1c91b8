"""What is planned: a training job, and the hardware it would run on."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from invdist.config.registry import BACKBONES
from invdist.config.schema import ExposuresConfig
from invdist.embeddings.placement import GIB
from invdist.models.build import with_head
from invdist.runtime.errors import UserError

FLOAT, ID, DOUBLE = 4, 8, 8
"""Bytes of a value, of an id or count, of a candidate loss."""

OPTIMIZER_FLOATS = {"adam": 2.0, "sgd": 0.0, "rowwise_adagrad": 0.0}
"""State values for each value of a table row; row-wise Adagrad keeps one value per row instead."""


@dataclass(frozen=True)
class Hardware:
    """Assumed properties of the GPUs and their links. The default bandwidths are TorchRec's."""

    hbm: float = 80.0 * GIB
    """Bytes of memory of one GPU."""
    ddr: float = 512.0 * GIB
    """Bytes of memory of one node that tables may fill, for `uvm`."""
    host_link: float = 25.0 * GIB
    """Bytes per second between a GPU and the memory of its node."""
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
    """Floating-point operations per second that the tower reaches."""
    operator_s: float = 5e-6
    """Seconds to launch one operator."""
    collective_s: float = 20e-6
    """Seconds to start one collective."""
    peer_s: float = 0.5e-6
    """Seconds per peer of an all-to-all."""


class BackboneSize(NamedTuple):
    """Sizes of a backbone in values."""

    columns: int
    """Columns of a table row."""
    dense: int
    """Dense parameters."""
    saved: int
    """Values that the backward pass of a pair keeps beside its rows."""
    frozen: int = 0
    """Columns of exposure vectors beside a table row, which have no optimizer state."""


@dataclass(frozen=True)
class Job:
    """A training job on a number of GPUs, one rank each."""

    users: int
    items: int
    dim: int = 32
    gpus: int = 8
    batch: int = 65_536
    """Labeled interactions per step over all ranks."""
    model: str = "gmf"
    rate: int = 1
    """Unlabeled pairs per interaction of a training-test batch."""
    candidates: int = 3
    optimizer: str = "adam"
    sharding: str = "auto"
    item_sharding: str | None = None
    """That of the items, if not `sharding`."""
    tables: str = "device"
    """Where tables and their optimizer state are: `device`, `uvm`, or `auto` (`rows.memory` of a run)."""
    rows: int | None = None
    """Labeled training interactions; None: no epoch time."""
    test_share: float = 0.1
    """Share of them that is training-test."""
    exposure_dim: int = 0
    """Columns of the exposure vectors that the model reads; 0: none."""
    hardware: Hardware = field(default_factory=Hardware)

    def check(self) -> None:
        """Raises `UserError` on values that make no job."""
        for name in ("users", "items", "dim", "gpus", "batch", "rate"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} must be at least 1, not {getattr(self, name)}")
        if self.model not in BACKBONES.names():
            raise UserError(f"--model {self.model} is unknown; there are {', '.join(BACKBONES.names())}")
        if self.candidates < 2:
            raise UserError(f"--candidates must be at least 2 (pass and another), not {self.candidates}")
        if self.dim % 4:
            raise UserError(f"--dim must be a multiple of 4, as FBGEMM needs, not {self.dim}")
        if self.exposure_dim < 0 or self.exposure_dim % 4:
            raise UserError(f"--exposure-dim must be 0 or a multiple of 4, not {self.exposure_dim}")
        kinds = set(self.shardings.values())
        if self.exposure_dim and (not kinds <= {"auto", "row_wise"} or self.optimizer != "adam"):
            raise UserError("--exposure-dim: exposure vectors need --sharding row_wise and --optimizer adam")
        if len(kinds) > 1 and "column_wise" in kinds:
            raise UserError("--item-sharding: if one table is column_wise, both must be")
        if self.tables == "uvm" and "data_parallel" in kinds:
            raise UserError("--tables uvm: data_parallel tables are on the device; use another --sharding")
        if self.batch < self.gpus:
            raise UserError(
                f"--batch is rows per step over all GPUs: {self.batch:,} leaves some of {self.gpus:,} GPUs without work"
            )
        if self.rows is not None and self.rows < 1:
            raise UserError(f"--rows must be at least 1, not {self.rows}")
        if not 0 < self.test_share < 1:
            raise UserError(f"--test-share must be between 0 and 1, not {self.test_share:g}")

    @property
    def shardings(self) -> dict[str, str]:
        """How each table is sharded."""
        return {"user": self.sharding, "item": self.item_sharding or self.sharding}

    @property
    def backbone(self) -> BackboneSize:
        """Sizes of the backbone."""
        return backbone_size(self.model, self.dim, self.exposure_dim)

    @property
    def pairs(self) -> int:
        """Labeled pairs of the fullest rank in a step, n."""
        return -(-self.batch // self.gpus)

    @property
    def unlabeled(self) -> int:
        """Unlabeled pairs of a rank in an inverse-gradient step, u."""
        return self.rate * self.pairs

    @property
    def row_bytes(self) -> float:
        """Bytes of one table row with its optimizer state and its exposure vector."""
        extra = FLOAT if self.optimizer == "rowwise_adagrad" else self.backbone.frozen * FLOAT
        return self.backbone.columns * FLOAT * (1 + OPTIMIZER_FLOATS[self.optimizer]) + extra

    @property
    def usable(self) -> float:
        """Bytes of a GPU's memory after the reserve."""
        return self.hardware.hbm * (1 - self.hardware.reserve)

    @property
    def near(self) -> float:
        """The share of a rank's peers that are on its own node."""
        return (min(self.hardware.gpus_per_node, self.gpus) - 1) / (self.gpus - 1) if self.gpus > 1 else 1.0


@functools.cache
def backbone_size(model: str, dim: int, exposure_dim: int = 0) -> BackboneSize:
    """The sizes of a backbone, counted on one built without memory."""
    pairs = 8
    with torch.device("meta"):
        backbone: Any = BACKBONES.get(model)(dim=dim)
        if exposure_dim:
            backbone = with_head(backbone, ExposuresConfig(vectors=True, dim=exposure_dim, learned=exposure_dim))
        columns = backbone.columns + backbone.frozen_columns
        user, item = (torch.empty(pairs, columns, requires_grad=True) for _ in range(2))
        parameters = {id(parameter) for parameter in backbone.parameters()}
        kept: list[int] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in parameters and tensor._base is None:
                kept.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            backbone(user, item)
    dense = sum(parameter.numel() for parameter in backbone.parameters())
    return BackboneSize(backbone.columns, dense, -(-sum(kept) // pairs), backbone.frozen_columns)
