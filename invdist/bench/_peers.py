"""The steps that this engine's are compared with: TorchRec's fused step, and the three copies of the authors' code."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from invdist.bench._steps import wait_for_device
from invdist.config.registry import BACKBONES
from invdist.data.stream.batches import Batch
from invdist.learning.losses import inverse_dual_loss, log_loss


def with_fused_rows(
    users: int,
    items: int,
    columns: int,
    device: torch.device,
    around: Callable[[nn.Module], nn.Module] = lambda collection: collection,
) -> Any:
    """TorchRec's `DistributedModelParallel` of two row-wise tables with fused SGD, in what `around` makes."""
    import torchrec
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints

    collection = torchrec.EmbeddingCollection(
        tables=[
            torchrec.EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=columns, feature_names=[name])
            for name, rows in (("user", users), ("item", items))
        ],
        device=torch.device("meta"),
    )
    module = around(collection)
    sharders: Any = [
        EmbeddingCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 1e-3})
    ]
    ranks = torch.distributed.get_world_size()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=ranks, compute_device=device.type, ddr_cap=1 << 38),
        constraints={
            name: ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])
            for name in ("user", "item")
        },
    )
    plan = planner.collective_plan(module, sharders, torch.distributed.group.WORLD)
    # With one rank there is nothing to average: its dense weights need no `DistributedDataParallel`.
    return DistributedModelParallel(module, device=device, plan=plan, sharders=sharders, init_data_parallel=ranks > 1)


class FusedStep:
    """A log-loss step as TorchRec's documentation sets it up: fused SGD on sharded rows in `backward`, dense SGD."""

    def __init__(
        self, users: int, items: int, model: str, dim: int, batches: Sequence[Batch], device: torch.device
    ) -> None:
        ranks = torch.distributed.get_world_size()
        backbone = BACKBONES.get(model)(dim=dim).to(device)
        self.rows = with_fused_rows(users, items, backbone.columns, device)
        self.backbone = nn.parallel.DistributedDataParallel(backbone) if ranks > 1 else backbone
        self.dense = torch.optim.SGD(backbone.parameters(), lr=1e-3)
        self._batches, self._device = cycle(batches), device

    def __call__(self, steps: int) -> float:
        """Mean seconds of a step."""
        from torchrec import KeyedJaggedTensor

        torch.distributed.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            batch = next(self._batches).to(self._device)
            ids = torch.cat([batch.user, batch.item])
            found = self.rows(KeyedJaggedTensor(["user", "item"], ids, lengths=torch.ones_like(ids, dtype=torch.int32)))
            logit = self.backbone(found["user"].values(), found["item"].values())
            loss = log_loss(logit, batch.label).mean()
            self.dense.zero_grad()
            loss.backward()
            self.dense.step()
        wait_for_device(self._device)
        return (time.perf_counter() - started) / steps


class ThreeCopiesStep:
    """Phase 2 as in the authors' code: three deep copies of a model in one process, dense gradients."""

    def __init__(
        self, users: int, items: int, model: str, dim: int, batches: Sequence[Batch], device: torch.device
    ) -> None:
        self.model = DenseModel(users, items, model, dim).to(device)
        self.gamma_step = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self._batches, self._device = cycle(batches), device

    def __call__(self, steps: int) -> float:
        """Mean seconds of a step."""
        started = time.perf_counter()
        for _ in range(steps):
            self.step(next(self._batches).to(self._device))
        wait_for_device(self._device)
        return (time.perf_counter() - started) / steps

    def step(self, batch: Batch) -> None:
        """One step of phase 2."""
        assert batch.unlabeled_user is not None
        assert batch.unlabeled_item is not None
        candidates: list[tuple[float, nn.Module]] = []
        for sign in (1.0, 0.0, -1.0):  # direct, pass, inverse
            candidate = copy.deepcopy(self.model)
            if sign:
                inner = torch.optim.Adam(candidate.parameters(), lr=1e-4)
                loss = inverse_dual_loss(candidate(batch.unlabeled_user, batch.unlabeled_item))[0].mean()
                (sign * loss).backward()
                inner.step()
            with torch.no_grad():
                loss = log_loss(candidate(batch.user, batch.item), batch.label).mean()
            candidates.append((loss.item(), candidate))
        self.model.load_state_dict(min(candidates, key=lambda c: c[0])[1].state_dict())
        self.plain_step(batch.user, batch.item, batch.label)

    def plain_step(self, user: Tensor, item: Tensor, label: Tensor) -> None:
        """One step of phase 1, on the log-loss of labeled pairs."""
        self.gamma_step.zero_grad()
        log_loss(self.model(user, item), label).mean().backward()
        self.gamma_step.step()


class DenseModel(nn.Module):
    """A backbone over two tables of PyTorch."""

    def __init__(self, users: int, items: int, model: str, dim: int, sparse: bool = False) -> None:
        super().__init__()
        self.backbone = BACKBONES.get(model)(dim=dim)
        self.user = nn.Embedding(users, self.backbone.columns, sparse=sparse)
        self.item = nn.Embedding(items, self.backbone.columns, sparse=sparse)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.backbone(self.user(user), self.item(item))
