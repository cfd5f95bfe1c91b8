"""Ray actors that hold the slices of a run and work on it.

Each answers questions about its slice to the others while it works. A killed one is started again by Ray, reads its
slice from the checkpoint again, and repeats what it was asked: every question and every piece of work gives the same
answer twice, so nothing is lost or doubled.
"""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from invdist import config as configs
from invdist.data.dataset import Dataset
from invdist.runtime.errors import UserError
from invdist.runtime.files import Folder
from invdist.runtime.paths import path_at
from invdist.runtime.process import configure_process
from invdist.serving.raw_ids import RawIds
from invdist.serving.run import TrainedRun
from invdist.serving.sharded.remote import Peers, RemoteIds, RemoteModel
from invdist.serving.sharded.slices import Cut, Slice
from invdist.serving.topk import TILE
from invdist.training.checkpoint.reader import open_checkpoint

_AT_ONCE = 2
"""Pieces of work of a worker at a time: one computes while the other waits for rows."""
_ANSWERS_AT_ONCE = 2


@dataclass(frozen=True)
class ShardedRun(TrainedRun):
    """A run whose rows and raw ids are with `peers`."""

    peers: Peers
    workers: int

    @property
    def cuts(self) -> tuple[Cut, Cut]:
        """How users and items are divided. Items in whole tiles, so that any division ranks in the same tiles."""
        return Cut(self.dataset.users, self.workers), Cut(self.dataset.items, self.workers, TILE)

    @cached_property
    def model(self) -> RemoteModel:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The model, its rows fetched as they are needed."""
        return RemoteModel(self.tables.backbone, self.cuts, self.tables.columns, self.peers)

    @cached_property
    def users(self) -> RawIds:
        """Raw ids of users, by index."""
        return RemoteIds("user", self.dataset.raw_id_type("users"), self.cuts[0], self.peers)

    @cached_property
    def items(self) -> RawIds:
        """Raw ids of items, by index."""
        return RemoteIds("item", self.dataset.raw_id_type("items"), self.cuts[1], self.peers)


@dataclass(frozen=True)
class _Job:
    """All that a worker needs to read its slice."""

    folder: str
    config: str
    dataset: Dataset
    checkpoint: Folder
    workers: int
    name: str

    def open(self, peers: Peers) -> ShardedRun:
        checkpoint = open_checkpoint(self.checkpoint)
        if checkpoint is None:
            raise UserError(f"{self.checkpoint} is no longer there: was training still removing old checkpoints?")
        checkpoint.cache_bytes = 0
        config = configs.from_text(self.config)
        return ShardedRun(path_at(self.folder), config, self.dataset, checkpoint, peers, self.workers)


class _ByName:
    """Peers found by their names; this worker's own slice is asked directly."""

    def __init__(self, name: str, worker: int | None = None, own: Callable[[], Slice] | None = None) -> None:
        self._name, self._worker, self._own = name, worker, own
        self._handles: dict[int, Any] = {}

    def ask(self, worker: int, method: str, *arguments: Any) -> Callable[[], Any]:
        """Calls a method of a worker's slice; the result, when it is called, waits for the answer."""
        if worker == self._worker:
            assert self._own is not None
            return lambda own=self._own: getattr(own(), method)(*arguments)
        import ray

        if worker not in self._handles:
            self._handles[worker] = ray.get_actor(_actor_name(self._name, worker))
        answer = self._handles[worker].answer.options(concurrency_group="answers").remote(method, *arguments)
        return lambda: _value(answer)


class _Worker:
    """The actor: a slice, and the run as it sees it."""

    def __init__(self, job: _Job, worker: int) -> None:
        configure_process(threads=1)
        self.run = job.open(_ByName(job.name, worker, lambda: self.slice))
        self.slice = Slice(self.run, self.run.cuts, worker)
        self.number = worker
        self._kept: dict[Any, Any] = {}
        self._lock = threading.Lock()

    def answer(self, method: str, *arguments: Any) -> Any:
        """What another worker asks of the slice."""
        return getattr(self.slice, method)(*arguments)

    def keep(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gave for this key the first time: what a kind of work needs for all of its pieces."""
        with self._lock:
            if key not in self._kept:
                self._kept[key] = make()
            return self._kept[key]

    def work(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `function(this worker, *arguments)`."""
        return function(self, *arguments)


class Workers:
    """The workers of a run, started on the Ray that this process is connected to."""

    def __init__(self, run: TrainedRun, workers: int | None = None) -> None:
        """Starts `workers` of them, by default one for each CPU of the cluster, each with one CPU."""
        import ray

        present = max(1, int(ray.cluster_resources().get("CPU", 1)))
        self.count = min(workers or present, present)
        name = f"invdist-{uuid.uuid4().hex[:12]}"
        needed = -(-run.tables.bytes // self.count)
        _check_memory(ray.cluster_resources().get("memory", 0.0), needed, self.count)
        job = _Job(str(run.folder), configs.dump(run.config), run.dataset, run.checkpoint.folder, self.count, name)
        self.run = ShardedRun(run.folder, run.config, run.dataset, run.checkpoint, _ByName(name), self.count)
        groups = {"answers": _ANSWERS_AT_ONCE, "work": _AT_ONCE}
        options = {"num_cpus": 1, "max_restarts": -1, "max_task_retries": -1, "concurrency_groups": groups}
        actor: Any = ray.remote(**options)(_Worker)  # pyright: ignore[reportCallIssue, reportArgumentType]
        self._job = shared = ray.put(job)  # kept: a restarted worker needs it again
        self._actors = [
            actor.options(
                name=_actor_name(name, worker),
                memory=needed,
                scheduling_strategy="SPREAD",
            ).remote(shared, worker)
            for worker in range(self.count)
        ]

    def load(self) -> None:
        """Waits until every worker has its rows, and all files of the checkpoint were compared with their checksums."""
        for _ in self.everywhere(_load):
            pass

    def close(self) -> None:
        """Ends the workers."""
        import ray

        for actor in self._actors:
            ray.kill(actor)

    def everywhere(self, function: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
        """The results of a function on every worker."""
        yield from map(_value, [self.submit(worker, function, *arguments) for worker in range(self.count)])

    def map(self, function: Callable[..., Any], pieces: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """The results of `function(worker, *piece)` in the order of the pieces, each on the next free worker.

        Pieces are taken as workers become free, so they may be made on the way.
        """
        import ray

        free = deque([*range(self.count)] * _AT_ONCE)
        ordered: deque[Any] = deque()
        busy: dict[Any, int] = {}
        left = iter(pieces)
        while True:
            while free and len(ordered) < 2 * _AT_ONCE * self.count and (piece := next(left, None)) is not None:
                ordered.append(self.submit(free[0], function, *piece))
                busy[ordered[-1]] = free.popleft()
            if not ordered:
                return
            for done in ray.wait(list(busy), num_returns=1, fetch_local=False)[0]:
                free.append(busy.pop(done))
            while ordered and ordered[0] not in busy:
                yield _value(ordered.popleft())

    def share(self, value: Any) -> Any:
        """A value to give to many pieces of work, sent once."""
        import ray

        return ray.put(value)

    def value(self, submitted: Any) -> Any:
        """The result of what was submitted."""
        return _value(submitted)

    def submit(self, worker: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Asks a worker for `function(worker, *arguments)`; what was shared or submitted comes as its value."""
        return self._actors[worker].work.options(concurrency_group="work").remote(function, *arguments)


def _load(worker: _Worker) -> None:
    worker.slice.verify()
    for side in ("user", "item"):
        worker.slice.table(side)


def _value(answer: Any) -> Any:
    """The value of an answer; a `UserError` of the worker as it was raised there."""
    import ray
    from ray.exceptions import RayTaskError

    try:
        return ray.get(answer)
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise UserError(str(error.cause)) from None
        raise


def _actor_name(name: str, worker: int) -> str:
    return f"{name}-{worker}"


def _check_memory(present: float, needed: int, workers: int) -> None:
    """`needed` bytes for each of `workers`: Ray would wait forever for nodes that have them."""
    if workers * needed > present:
        raise UserError(
            f"the tables take {workers * needed / 2**30:,.1f} GiB, and the nodes of the Ray cluster have "
            f"{present / 2**30:,.1f} GiB: add nodes"
        )
