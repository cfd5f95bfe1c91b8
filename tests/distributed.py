"""Runs a function on several gloo ranks, as real processes."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _rank(rank: int, world_size: int, folder: str, queue: Any, function: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    try:
        queue.put((rank, function(rank, world_size, *args), None))
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))
    finally:
        dist.destroy_process_group()


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120) -> list[Any]:
    """Calls `function(rank, world_size, *args)` on each rank of a gloo group; gives the results by rank.

    `function` must be importable (top level of a module). Tensors in results are fine if small; numpy is better.
    An exception on any rank is raised here with its traceback.
    """
    context = mp.get_context("forkserver")
    # The imports take seconds; the fork server does them once for all ranks of all tests.
    context.set_forkserver_preload(["torchrec", "invdist.training.trainer", "invdist.learning.strategies"])
    with tempfile.TemporaryDirectory() as folder:
        queue = context.Queue()
        processes = [
            context.Process(target=_rank, args=(rank, world_size, folder, queue, function, args))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        results: dict[int, Any] = {}
        errors: list[str] = []
        try:
            for _ in processes:
                rank, result, error = queue.get(timeout=timeout)
                results[rank] = result
                if error:
                    errors.append(f"rank {rank}:\n{error}")
        finally:
            for process in processes:
                process.join(10)
                if process.is_alive():
                    process.kill()
        if errors:
            raise AssertionError("\n".join(errors))
        return [results[rank] for rank in range(world_size)]
