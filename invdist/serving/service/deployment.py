"""The service on Ray Serve: one loader that follows the run, and replicas that answer with what it has loaded."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray import serve

from invdist.runtime.process import configure_process
from invdist.serving.run import TrainedRun
from invdist.serving.service.app import build_app
from invdist.serving.service.batching import Batcher
from invdist.serving.service.front import close_internal_port
from invdist.serving.service.metrics import ServiceMetrics
from invdist.serving.service.model import ServedModel, pack
from invdist.serving.service.requests import Limits
from invdist.serving.service.watch import POLL_SECONDS, CheckpointWatcher
from invdist.serving.service.whole_answers import write_whole_answers
from invdist.training.ray_metrics import node_metrics

_log = logging.getLogger("ray.serve")


@serve.deployment(num_replicas=1, ray_actor_options={"num_cpus": 0}, max_ongoing_requests=1000)
class Loader:
    """Puts the checkpoint to serve into the object store, and the next one when there is one."""

    def __init__(self, watcher: CheckpointWatcher) -> None:
        close_internal_port()
        self._number = 0
        self._newest: Any = None
        watcher.changed(self._take)
        threading.Thread(target=watcher.follow, args=(self._take,), name="checkpoints", daemon=True).start()

    async def newest(self, known: str | None) -> tuple[str, list[Any]] | None:
        """(its name, a reference to it in a list) if another model than `known` is to be served."""
        name, reference = self._newest
        return None if name == known else (name, [reference])  # in a list: a bare reference would be copied here

    def _take(self, run: TrainedRun) -> None:
        self._number += 1
        # The time tells models of this loader from those of one that died.
        self._newest = f"{time.time_ns()}-{self._number}", ray.put(pack(run))


class _Replica:
    """Answers requests. The model is replaced by one assignment; a request ends with the one it began with."""

    async def __init__(self, loader: Any, token: str, limits: Limits) -> None:
        close_internal_port()
        write_whole_answers()
        configure_process(threads=1)
        self.limits, self._token, self._loader = limits, token, loader
        self._metrics = ServiceMetrics()
        self._scoring, self._long, self._asking = (ThreadPoolExecutor(1, name) for name in ("scoring", "long", "ask"))
        self._name: str | None = None
        await self._take_newest()
        self._following = asyncio.get_running_loop().create_task(self._follow())

    def __serve_build_asgi_app__(self) -> Any:
        """The application, as Serve asks for it."""
        return build_app(self, self._token)

    def current(self) -> tuple[ServedModel, Batcher]:
        """The model and its batcher."""
        return self._current

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        """Computes something long outside the event loop, and outside the thread that scores."""
        return await asyncio.get_running_loop().run_in_executor(self._long, function)

    async def metrics(self) -> str:
        """Metrics of all replicas of this node."""
        return await asyncio.get_running_loop().run_in_executor(self._asking, node_metrics, "ray_invdist_")

    def observe(self, route: str, status: int, seconds: float, rows: int) -> None:
        """Counts an answer."""
        self._metrics.observe(route, status, seconds, rows)

    async def _take_newest(self) -> None:
        found = await self._loader.newest.remote(self._name)
        if found is None:
            return
        name, (reference,) = found
        served = ServedModel(await reference)
        self._current = served, Batcher(served.logits, self._scoring, self._metrics.batch)
        self._name = name
        self._metrics.checkpoint(served.checkpoint["step"])

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                await self._take_newest()
            except Exception as error:  # the loader is being restarted, say: what is served stays
                _log.warning("no news of checkpoints: %s", error)


def application(watcher: CheckpointWatcher, token: str, limits: Limits, replicas: int) -> serve.Application:
    """The application to give to `serve.run`."""
    replica = serve.deployment(
        name="Replica",
        num_replicas=replicas,
        max_ongoing_requests=256,
        health_check_period_s=2,
        ray_actor_options={"num_cpus": 1},
        logging_config={"enable_access_log": False},
    )(serve.ingress(None)(_Replica))
    return replica.bind(Loader.bind(watcher), token, limits)
