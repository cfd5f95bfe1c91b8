"""Steps of this engine on random batches, run as in training, in processes that are ranks of one group."""

from __future__ import annotations

import multiprocessing.queues
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from invdist.config.registry import STRATEGIES
from invdist.data.stream.batches import Batch
from invdist.learning.strategy import Setting
from invdist.models.recommender import Recommender
from invdist.runtime.errors import UserError
from invdist.runtime.process import configure_process
from invdist.training.prefetch import with_exchange

_BATCHES = 16  # enough that the rows of a batch are not still in the cache from its last turn
_POLL_S = 1.0


def random_batches(
    users: int,
    items: int,
    rows: int,
    *,
    rank: int = 0,
    ranks: int = 1,
    rate: int = 1,
    zipf: float = 0.0,
    count: int = _BATCHES,
) -> list[Batch]:
    """`count` batches of `rows` labeled pairs with `rate` unlabeled pairs for each, different on every rank.

    Pairs are drawn uniformly: the hardest case, because hardly any table row repeats within a batch. With `zipf`, ids
    are drawn by popularity.
    """
    source, popular = torch.Generator().manual_seed(rank), np.random.default_rng(rank)

    def draw(high: int, pairs: int = rows) -> Tensor:
        if zipf:
            return torch.from_numpy(popular_ids(popular, high, pairs, zipf))
        return torch.randint(high, (pairs,), generator=source)

    many = rows * rate
    return [
        Batch(draw(users), draw(items), draw(2).float(), draw(users, many), draw(items, many), rows * ranks, step)
        for step in range(count)
    ]


def popular_ids(source: np.random.Generator, ids: int, count: int, zipf: float) -> np.ndarray:
    """`count` of `ids` ids, the chance of id i being ~ (i + 1)^-zipf."""
    chance = np.arange(1, ids + 1, dtype=np.float64) ** -zipf
    return source.choice(ids, count, p=chance / chance.sum())


class Driver:
    """Runs steps of one strategy, with ids exchanged ahead as in the training loop."""

    def __init__(self, model: Recommender, method: str, phase: int, batches: Sequence[Batch], **options: Any) -> None:
        setting = Setting(
            options=STRATEGIES.get(method).Config(**options), unlabeled_rate=1, gamma=1e-3, users=0, items=0
        )
        self.model = model
        self.strategy = STRATEGIES.get(method)(setting, model)
        self.phase = self.strategy.phases(setting)[phase]
        self._steps = self.steps(cycle(batches))

    def steps(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Takes one step for each batch, and gives the batch when it is done."""
        for batch, exchange in with_exchange(batches, self.strategy, self.phase, self.strategy.watch):
            self.strategy.step(self.phase, batch, exchange)
            yield batch

    def __call__(self, steps: int) -> float:
        """Mean seconds of a step."""
        self.model.comm.barrier()
        started = time.perf_counter()
        for _ in islice(self._steps, steps):
            pass
        wait_for_device(self.model.device)
        return (time.perf_counter() - started) / steps


def wait_for_device(device: torch.device) -> None:
    """Returns when a GPU has finished its work: the host only launches it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_mb(kind: str) -> float:
    """Memory of this process: `VmRSS` now, `VmHWM` at its peak. What several ranks share is divided among them."""

    def kilobytes(file: str, name: str) -> int:
        with open(f"/proc/self/{file}") as lines:
            return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)

    of_others = kilobytes("status", "RssShmem") - kilobytes("smaps_rollup", "Pss_Shmem")
    return (kilobytes("status", kind) - of_others) / 1024


def forget_peak() -> None:
    """Makes `VmHWM` the peak from now on."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def on_ranks(
    function: Callable[..., Any], ranks: int, *args: Any, together: bool = True, backend: str = "gloo"
) -> list[Any]:
    """Calls `function(rank, *args)` in fresh processes, one thread each; with nccl, each has a GPU of its own.

    They form one group, or if not `together`, a group each.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        groups = [(rank, ranks, "store") if together else (0, 1, f"store-{rank}") for rank in range(ranks)]
        processes = [
            context.Process(
                target=_rank,
                args=(rank, place, size, os.path.join(folder, store), backend, results, function, args),
                daemon=True,
            )
            for rank, (place, size, store) in enumerate(groups)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(results, processes)
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()


def _collect(results: multiprocessing.queues.Queue, processes: Sequence[Any]) -> list[Any]:
    by_rank: dict[int, Any] = {}
    while len(by_rank) < len(processes):
        try:
            rank, result, error = results.get(timeout=_POLL_S)
        except queue.Empty:
            # A rank that was killed, for example for lack of memory, leaves no message.
            dead = [r for r, p in enumerate(processes) if p.exitcode and r not in by_rank]
            if dead:
                raise UserError(
                    f"rank {dead[0]} ended with code {processes[dead[0]].exitcode} (-9: out of memory?)"
                ) from None
            continue
        if error:
            raise RuntimeError(f"rank {rank}:\n{error}")
        by_rank[rank] = result
    return [by_rank[rank] for rank in range(len(processes))]


def _rank(
    rank: int,
    place: int,
    size: int,
    store: str,
    backend: str,
    results: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    configure_process(threads=1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=dist.FileStore(store, size), rank=place, world_size=size)
    try:
        results.put((rank, function(rank, *args), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    finally:
        dist.destroy_process_group()
