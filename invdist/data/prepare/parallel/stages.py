"""Stages of tasks on Ray. What a task has finished is on disk: nothing is repeated after a kill, and nothing doubled.

A task writes files of its own, which have their names when they are whole, and last a marker `done/STAGE-NUMBER.json`
with its result. A task that was killed leaves no marker and is done again, from its inputs, with the same result.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Sequence
from typing import Any

from invdist.runtime.errors import UserError
from invdist.runtime.files import Folder

Result = dict[str, Any]
Task = Callable[..., Result]
_RETRIES = 10
"""How often Ray starts a task again whose worker has died."""


class Stages:
    """Runs stages on the Ray that this process is connected to, at most `workers` tasks at a time."""

    def __init__(self, work: Folder, workers: int, progress: Callable[[str, int], None]) -> None:
        self.work, self.workers, self.progress = work, workers, progress
        self._done = work.child("done")
        self._done.make()
        self._finished = set(self._done.files())
        self.peak_memory: dict[str, int] = {}
        """The largest memory (bytes) that a process had by the end of a task of each stage."""

    def run(self, stage: str, task: Task, context: Any, calls: Sequence[tuple]) -> list[Result]:
        """The results of `task(context, *call)` for every call, in their order. `context` is sent to Ray once.

        `rows` in a result counts for the progress. `UserError` if a task says so.
        """
        import ray
        from ray.exceptions import RayError, RayTaskError

        markers = [f"{stage.replace(' ', '_')}-{number:06d}.json" for number in range(len(calls))]
        results = {n: self._read(name) for n, name in enumerate(markers) if name in self._finished}
        rows = sum(result.get("rows", 0) for result in results.values())
        waiting = iter([n for n in range(len(calls)) if n not in results])
        shared = ray.put(context) if len(results) < len(calls) else None
        remote = ray.remote(num_cpus=1, max_retries=_RETRIES)(_run)
        running: dict[Any, int] = {}

        def start() -> bool:
            if (number := next(waiting, None)) is None:
                return False
            running[remote.remote(task, shared, calls[number], self._done, markers[number])] = number
            return True

        try:
            while len(running) < self.workers and start():
                pass
            while running:
                (ready,), _ = ray.wait(list(running), num_returns=1)
                number = running.pop(ready)
                try:
                    results[number] = result = ray.get(ready)
                except RayTaskError as error:
                    raise error.as_instanceof_cause() from None
                except RayError as error:
                    message = str(error).splitlines()[0]
                    raise OSError(f"a worker died again and again while {stage}: {message}") from error
                if "error" in result:
                    raise UserError(result["error"])
                start()
                rows += result.get("rows", 0)
                self.progress(stage, rows)
        finally:
            for task_of in running:
                ray.cancel(task_of, force=True)
        self.peak_memory[stage] = max((result["peak_memory"] for result in results.values()), default=0)
        return [results[number] for number in range(len(calls))]

    def _read(self, name: str) -> Result:
        with self._done.open(name) as file:
            return json.loads(file.read())


def _run(task: Task, context: Any, call: tuple, done: Folder, marker: str) -> Result:
    import pyarrow as pa

    pa.set_cpu_count(1)
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
