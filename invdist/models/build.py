"""Builds a recommender on one rank from plain settings."""

from __future__ import annotations

import torch
from torch import Tensor

from invdist.config.registry import BACKBONES
from invdist.config.schema import OptimizerConfig, RowsConfig, TowerConfig
from invdist.embeddings.comm import Comm
from invdist.embeddings.row_optimizers import SGD, Adam, RowOptimizer, RowwiseAdagrad
from invdist.embeddings.shared_memory import connect
from invdist.embeddings.store import EmbeddingStore
from invdist.embeddings.tables import Sharding, Table, shard_tables
from invdist.models.flat import FlatAdamW
from invdist.models.recommender import Recommender


class ModelSpec(RowsConfig, TowerConfig, OptimizerConfig):
    """What a model is, how it is stored and how it is stepped: three sections of the settings, and the rest of it."""

    users: int
    items: int
    model: str = "gmf"
    seed: int = 0
    sharding: Sharding = "row_wise"
    precision: str = "fp32"
    batch_size: int = 1024


def build_recommender(spec: ModelSpec, device: torch.device, comm: Comm | None = None) -> Recommender:
    """A recommender with fresh rows and weights, which depend on the spec only and not on the number of ranks."""
    device = indexed_device(device)
    comm = comm or connect()
    comm.device = device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        backbone = BACKBONES.get(spec.model)(dim=spec.dim, dropout=spec.dropout, bias=spec.bias)
    backbone.to(device)
    tables = shard_tables(
        tuple(Table(name, rows, backbone.columns) for name, rows in (("user", spec.users), ("item", spec.items))),
        spec.sharding,
        device=device,
        batch_size=spec.batch_size,
        hbm_gb=spec.hbm_gb,
        ddr_gb=spec.ddr_gb,
        copies={"adam": 3.0, "sgd": 1.0, "rowwise_adagrad": 1 + 1 / backbone.columns}[spec.optimizer],
        group=comm.group,
    )
    rows = EmbeddingStore(tables, comm, lambda local_rows, rows: _row_optimizer(spec, local_rows, rows))
    rows.init(spec.seed, spec.init_std)
    return Recommender(rows, backbone, _dense_optimizer(spec, backbone), precision=spec.precision)


def indexed_device(device: torch.device) -> torch.device:
    """The same device with its index: TorchRec refuses a shard on `cuda:0` if it was told `cuda`."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _row_optimizer(spec: ModelSpec, local_rows: Tensor, rows: EmbeddingStore) -> RowOptimizer:
    shared = {"gamma": spec.gamma, "weight_decay": spec.weight_decay, "eps": spec.eps}
    if spec.optimizer == "adam":
        return Adam(local_rows, beta1=spec.beta1, beta2=spec.beta2, **shared)
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
