"""Small collectives on a gloo group of their own, safe to call from the checkpoint thread while training goes on."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from invdist.embeddings.comm import Comm


class Ranks:
    """The ranks of `comm` (None: this process alone). Every rank creates it at the same time.

    A collective fails with `RuntimeError` when a rank does not join within `timeout_s`.
    """

    def __init__(self, comm: Comm | None, timeout_s: float) -> None:
        self.rank, self.size = (comm.rank, comm.size) if comm else (0, 1)
        self._group = None
        if comm is not None and comm.size > 1:
            members = dist.get_process_group_ranks(comm.group or dist.group.WORLD)
            self._group = dist.new_group(members, timeout=timedelta(seconds=timeout_s), backend="gloo")

    def gather(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages of all ranks, in order of rank. They travel as JSON: pickle could run code on arrival."""
        payload = json.dumps(message).encode()
        if self.size == 1:
            return [json.loads(payload)]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(payload)]), group=self._group)
        padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        received = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(received, padded, group=self._group)
        return [json.loads(bytes(each[: int(size)].numpy())) for each, size in zip(received, sizes, strict=True)]
