"""Words between ranks about checkpoints, on a process group of their own, so that a background thread may speak."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from invdist.embeddings.comm import Comm


class Ranks:
    """The ranks of `comm` (None: this process alone). Every rank makes it at the same time.

    A rank that says nothing for `timeout_s` is taken for lost.
    """

    def __init__(self, comm: Comm | None, timeout_s: float) -> None:
        self.rank, self.size = (comm.rank, comm.size) if comm else (0, 1)
        self._group = None
        if comm is not None and comm.size > 1:
            members = dist.get_process_group_ranks(comm.group or dist.group.WORLD)
            self._group = dist.new_group(members, timeout=timedelta(seconds=timeout_s), backend="gloo")

    def gather(self, word: dict[str, Any]) -> list[dict[str, Any]]:
        """What every rank says, in order of rank; as JSON, so that nothing received can run."""
        text = json.dumps(word).encode()
        if self.size == 1:
            return [json.loads(text)]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(text)]), group=self._group)
        room = torch.zeros(int(max(sizes)), dtype=torch.uint8)
        room[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        words = [torch.empty_like(room) for _ in range(self.size)]
        dist.all_gather(words, room, group=self._group)
        return [json.loads(bytes(w[: int(n)].numpy())) for w, n in zip(words, sizes, strict=True)]
