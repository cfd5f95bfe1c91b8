"""One of many ranks, without the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_ranks(ranks: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of which this process is one rank, and whose collectives move nothing."""

    def gather(objects: list[Any], mine: Any, group: Any = None) -> None:
        objects[:] = [mine] * len(objects)

    monkeypatch.setattr(dist, "all_gather_object", gather)
    # TorchRec would gather the shards of all ranks for a state dict that we do not use.
    collection = "torchrec.distributed.embedding.ShardedEmbeddingCollection"
    monkeypatch.setattr(f"{collection}._initialize_torch_state", lambda *args, **options: None)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda *args, **options: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(min(ranks, 8)))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
