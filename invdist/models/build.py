"""Builds a recommender on one rank from plain settings."""

from __future__ import annotations

import torch
from torch import Tensor

from invdist.config.fields import Positive
from invdist.config.registry import BACKBONES
from invdist.config.schema import ExposuresConfig, OptimizerConfig, RowsConfig, TowerConfig
from invdist.embeddings.comm import Comm
from invdist.embeddings.row_moves import in_unified_memory
from invdist.embeddings.row_optimizers import SGD, Adam, ColumnGroup, RowOptimizer, RowwiseAdagrad
from invdist.embeddings.shared_memory import connect
from invdist.embeddings.store import EmbeddingStore
from invdist.embeddings.tables import Sharding, Table, shard_tables
from invdist.models.backbone import Backbone
from invdist.models.exposure_head import COUNT_COLUMNS, ExposureHead
from invdist.models.flat import FlatAdamW
from invdist.models.recommender import Recommender

_DECAY_LABELS = 30_000  # measured on ML-1M and KuaiRand with 5% and all labels


class ModelSpec(RowsConfig, TowerConfig, OptimizerConfig):
    """What a model is, how it is stored and how it is stepped: three sections of the settings, and the rest of it."""

    users: int
    items: int
    model: str = "gmf"
    seed: int = 0
    sharding: Sharding = "row_wise"
    precision: str = "fp32"
    batch_size: int = 1024
    gamma: Positive = 1e-3  # pyright: ignore[reportIncompatibleVariableOverride]  # `auto` is a number by now
    """Learning rate of the log-loss steps."""
    exposures: ExposuresConfig = ExposuresConfig()
    grown: bool = False
    """With exposure vectors its rows are kept as they started, too (`Anchor`)."""


def build_backbone(model: str, rows: RowsConfig, tower: TowerConfig, exposures: ExposuresConfig) -> Backbone:
    """A backbone by name, with the head that reads exposure vectors if those are used."""
    inner = BACKBONES.get(model)(dim=rows.dim, dropout=tower.dropout, bias=rows.bias)
    return with_head(inner, exposures)


def with_head(inner: Backbone, exposures: ExposuresConfig) -> Backbone:
    """`inner`, or `inner` with a head over exposure vectors."""
    if not exposures.vectors:
        return inner
    o = exposures
    return ExposureHead(inner, o.dim, hidden=o.hidden, dropout=o.dropout, prior=o.prior)


def build_recommender(
    spec: ModelSpec, device: torch.device, comm: Comm | None = None, vectors: EmbeddingStore | None = None
) -> Recommender:
    """A recommender with fresh rows and weights, which depend on the spec only and not on the number of ranks.

    `vectors` are the frozen exposure vectors, if the spec uses them.
    """
    device = indexed_device(device)
    comm = comm or connect()
    comm.device = device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        inner = BACKBONES.get(spec.model)(dim=spec.dim, dropout=spec.dropout, bias=spec.bias)
        backbone = with_head(inner, spec.exposures)
    backbone.to(device)
    copies = {"adam": 3.0, "sgd": 1.0, "rowwise_adagrad": 1 + 1 / backbone.columns}[spec.optimizer]
    tables = shard_tables(
        tuple(Table(name, rows, backbone.columns) for name, rows in (("user", spec.users), ("item", spec.items))),
        "row_wise" if vectors is not None else spec.shardings,
        device=device,
        batch_size=spec.batch_size,
        hbm_gb=spec.hbm_gb,
        ddr_gb=spec.ddr_gb,
        copies=copies + (spec.grown and vectors is not None),
        **_in_use(vectors),
        memory=spec.memory,
        hashed=spec.placement == "hashed",
        group=comm.group,
    )
    rows = EmbeddingStore(
        tables, comm, lambda local_rows, rows: _row_optimizer(spec, backbone, local_rows, rows), payload=spec.payload
    )
    rows.init(spec.seed, spec.init_std)
    decay = None
    if isinstance(backbone, ExposureHead):
        rows.local_rows[:, backbone.inner.columns :] = 0.0  # without labels the head has no opinion of its own
        assert vectors is not None
        decay = _head_decay(spec, backbone, _labels(vectors))
    return Recommender(
        rows, backbone, _dense_optimizer(spec, backbone), precision=spec.precision, vectors=vectors, dense_decay=decay
    )


def _in_use(vectors: EmbeddingStore | None) -> dict[str, int]:
    """Bytes that exposure vectors take, by where they are."""
    if vectors is None:
        return {}
    return {"host_taken" if in_unified_memory(vectors.local_rows) else "taken": vectors.local_rows.nbytes}


def _labels(vectors: EmbeddingStore) -> float:
    """Labels by the counts beside the vectors; for a model that grew, those of the days before are among them."""
    counted = vectors.local_rows[:, 1 - COUNT_COLUMNS].sum(dtype=torch.float64)
    return float(vectors.comm.all_reduce(counted).wait()) / 2  # a label counts for its user and for its item


def _head_decay(spec: ModelSpec, backbone: ExposureHead, labels: float) -> Tensor:
    """What one step multiplies each dense weight by: only those of the head shrink, the more the fewer labels."""
    given = spec.exposures.weight_decay
    decay = min(1.0, _DECAY_LABELS / max(labels, 1)) if given is None else given
    head = {id(parameter) for parameter in backbone.head_parameters()}
    factors = [
        torch.full((parameter.numel(),), 1 - spec.gamma * decay * (id(parameter) in head))
        for parameter in backbone.parameters()
    ]
    return torch.cat(factors).to(next(backbone.parameters()).device)


def indexed_device(device: torch.device) -> torch.device:
    """The same device with its index: TorchRec refuses a shard on `cuda:0` if it was told `cuda`."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _row_optimizer(spec: ModelSpec, backbone: Backbone, local_rows: Tensor, rows: EmbeddingStore) -> RowOptimizer:
    shared = {"gamma": spec.gamma, "weight_decay": spec.weight_decay, "eps": spec.eps}
    if spec.optimizer == "adam":
        groups = ()
        if isinstance(backbone, ExposureHead):
            own = backbone.inner.columns
            # One label changes the mean gradient of a batch by about 1 / batch size. With an epsilon of that size, rows
            # with few labels move in proportion to them, not at full speed as Adam otherwise would.
            head = ColumnGroup(backbone.columns - own, spec.exposures.gamma, 1 / spec.batch_size)
            groups = (ColumnGroup(own, spec.gamma, spec.eps), head)
        return Adam(local_rows, beta1=spec.beta1, beta2=spec.beta2, groups=groups, **shared)
    if spec.optimizer == "rowwise_adagrad":
        return RowwiseAdagrad(local_rows, columns=rows.columns, square_sum=rows.square_sum, **shared)
    return SGD(local_rows, **shared)


def _dense_optimizer(spec: ModelSpec, backbone: torch.nn.Module) -> torch.optim.Optimizer:
    parameters = list(backbone.parameters())
    if spec.optimizer == "adam":
        betas = (spec.beta1, spec.beta2)
        return FlatAdamW(parameters, lr=spec.gamma, betas=betas, eps=spec.eps, weight_decay=spec.weight_decay)
    if spec.optimizer == "rowwise_adagrad":
        return torch.optim.Adagrad(parameters, lr=spec.gamma, eps=spec.eps, weight_decay=spec.weight_decay)
    return torch.optim.SGD(parameters, lr=spec.gamma, weight_decay=spec.weight_decay)
