"""Stages of tasks on Ray. What a task has finished is on disk: nothing is repeated after a kill, and nothing doubled.

A task writes files of its own, which have their names when they are whole, and last a marker `done/STAGE-NUMBER.json`
with its result. A task that was killed leaves no marker and is done again, from its inputs, with the same result.
"""

from __future__ import annotations

import contextlib
import json
import resource
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from invdist.runtime.errors import UserError
from invdist.runtime.files import Folder

Result = dict[str, Any]
Task = Callable[..., Result]
Calls = dict[int, tuple[tuple, Folder, str]]
"""By number: the arguments of a task, and the folder and name of its marker."""
_RETRIES = 10
"""How often Ray starts a task again whose worker has died."""


class Stages:
    """Runs stages on the Ray that this process is connected to, at most `workers` tasks at a time; 0: in this process,
    one after the other, without Ray."""

    def __init__(self, work: Folder, workers: int, progress: Callable[[str, int], None]) -> None:
        self.work, self.workers, self.progress = work, workers, progress
        self._done = work.child("done")
        self._done.make()
        self._finished = set(self._done.files())
        self.peak_memory: dict[str, int] = {}
        """The largest memory (bytes) that a process had by the end of a task of each stage."""
        self.seconds: dict[str, float] = {}
        """How long each stage took."""

    def run(self, stage: str, task: Task, context: Any, calls: Sequence[tuple]) -> list[Result]:
        """The results of `task(context, *call)` for every call, in their order. `context` is sent to Ray once.

        `rows` in a result counts for the progress. `UserError` if a task says so.
        """
        start = time.perf_counter()
        markers = [f"{stage.replace(' ', '_')}-{number:06d}.json" for number in range(len(calls))]
        results = {n: self._read(name) for n, name in enumerate(markers) if name in self._finished}
        rows = sum(result.get("rows", 0) for result in results.values())
        missing = {n: (calls[n], self._done, markers[n]) for n in range(len(calls)) if n not in results}
        with contextlib.closing((self._on_ray if self.workers else _here)(stage, task, context, missing)) as finished:
            for number, result in finished:
                if "error" in result:
                    raise UserError(result["error"])
                results[number] = result
                rows += result.get("rows", 0)
                self.progress(stage, rows)
        self.peak_memory[stage] = max((result["peak_memory"] for result in results.values()), default=0)
        self.seconds[stage] = time.perf_counter() - start
        return [results[number] for number in range(len(calls))]

    def _on_ray(self, stage: str, task: Task, context: Any, calls: Calls) -> Generator[tuple[int, Result]]:
        import ray
        from ray.exceptions import RayError, RayTaskError

        if not calls:
            return
        shared = ray.put(context)
        remote = ray.remote(num_cpus=1, max_retries=_RETRIES)(_run)
        waiting = iter(calls.items())
        running: dict[Any, int] = {}
        try:
            while True:
                while len(running) < self.workers and (following := next(waiting, None)):
                    running[remote.remote(task, shared, *following[1])] = following[0]
                if not running:
                    return
                (ready,), _ = ray.wait(list(running), num_returns=1)
                number = running.pop(ready)
                try:
                    result = ray.get(ready)
                except RayTaskError as error:
                    raise error.as_instanceof_cause() from None
                except RayError as error:
                    message = str(error).splitlines()[0]
                    raise OSError(f"workers died again and again at {stage}: {message}") from error
                yield number, result
        finally:
            for unfinished in running:
                ray.cancel(unfinished, force=True)

    def _read(self, name: str) -> Result:
        with self._done.open(name) as file:
            return json.loads(file.read())


def _here(stage: str, task: Task, context: Any, calls: Calls) -> Generator[tuple[int, Result]]:
    for number, call in calls.items():
        yield number, _run(task, context, *call)


def _run(task: Task, context: Any, call: tuple, done: Folder, marker: str) -> Result:
    try:
        result = task(context, *call)
    except UserError as error:
        # Returned, not raised: Ray would add its own traceback.
        return {"error": str(error)}
    result["peak_memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    content = json.dumps(result)
    with done.create(marker, flush=False) as file:
        file.write(content.encode())
    return json.loads(content)
