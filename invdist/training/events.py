"""Writes the events of a run: `metrics.jsonl`, and the same for TensorBoard and other places that are watched."""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TextIO

from invdist.runtime.paths import AnyPath, StorePath
from invdist.training.history import METRICS_FILE, end_of_last_line
from invdist.training.tensorboard import Writer

_FLUSH_S = 1.0
_STORE_FLUSH_S = 5.0
_WAITING = 10_000  # events; with more a step waits, so that a disk that hangs does not fill the memory


class Sink(Protocol):
    """Another place that events are written to, such as TensorBoard. Called by the thread that writes."""

    def write(self, event: dict[str, Any]) -> None:
        """Takes one event."""
        ...

    def close(self) -> None:
        """Writes what is pending."""
        ...


class _Line(NamedTuple):
    text: str
    event: dict[str, Any]


class EventLog:
    """Writes a run's events in their order. Only the first rank writes; on the others, calls do nothing.

    A thread writes, so that a step does not wait for the disk. Readers see a step within a second, or earlier: with
    every `flush_every`th step that is written. They see other events at once. A process that is killed loses the steps
    of its last second at most; one that ends in any other way loses nothing. An error of the thread is raised by the
    next call. `sinks` get the same events. In an object store, steps are seen and lost within a few seconds.
    """

    def __init__(self, run: AnyPath, writes: bool, flush_every: int = 1, sinks: Sequence[Sink] = ()) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._queue: queue.Queue[_Line | threading.Event | None] = queue.Queue(_WAITING)
        if not writes:
            return
        run.mkdir(parents=True, exist_ok=True)
        if isinstance(run, StorePath):
            file = _StoreFile(run / METRICS_FILE)  # without TensorBoard, whose writer knows local folders only
        else:
            path = run / METRICS_FILE
            file, sinks = path.open("a", encoding="utf-8"), [Writer(run), *sinks]
            # A killed writer may have left part of a line: the next event must start on a new one.
            file.truncate(end_of_last_line(path))
        self._thread = threading.Thread(target=self._run, args=(file, sinks, flush_every), name="events", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def write(self, kind: str, **fields: Any) -> None:
        """Adds one event. Its values are copied: the caller may change them afterwards."""
        if self._thread is None:
            return
        self._raise_failure()
        event = {"event": kind, "time": time.time(), **jsonable(fields)}
        self._queue.put(_Line(json.dumps(event, allow_nan=False) + "\n", event))

    def flush(self) -> None:
        """Returns when everything added so far is in the file."""
        if self._thread is None:
            return
        flushed = threading.Event()
        self._queue.put(flushed)
        flushed.wait()
        self._raise_failure()

    def close(self) -> None:
        """Writes what is left and closes both files."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        atexit.unregister(self.close)
        self._queue.put(None)
        thread.join()
        self._raise_failure()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self, file: TextIO | _StoreFile, sinks: Sequence[Sink], flush_every: int) -> None:
        """The thread: takes lines to write, flushes to answer (`threading.Event`), and None, the end."""
        unflushed, due = 0, math.inf
        while True:
            try:
                item = self._queue.get(timeout=max(0.0, due - time.monotonic()) if unflushed else None)
            except queue.Empty:
                item = threading.Event()
            # After a failure the thread goes on: a caller that waits for a flush must get an answer.
            try:
                if isinstance(item, _Line):
                    due = due if unflushed else time.monotonic() + _FLUSH_S
                    unflushed += 1
                    file.write(item.text)
                    for sink in sinks:
                        sink.write(item.event)
                step = isinstance(item, _Line) and item.event["event"] == "step"
                if not step or unflushed >= flush_every or time.monotonic() >= due:
                    unflushed = 0
                    if isinstance(file, _StoreFile) and step:
                        file.flush_now_and_then()
                    else:
                        file.flush()
                if item is None:
                    for sink in sinks:
                        sink.close()
            except Exception as error:  # raised by the next call
                self._failure = error
            if isinstance(item, threading.Event):
                item.set()
            elif item is None:
                with contextlib.suppress(OSError):  # a failed flush was noted above
                    file.close()
                return


class _StoreFile:
    """A text file of an object store to append to. It is written anew each time, so steps alone wait for a while."""

    def __init__(self, path: StorePath) -> None:
        self._path = path
        self._content = bytearray(path.read_bytes() if path.exists() else b"")
        self._next = 0.0

    def write(self, text: str) -> None:
        """Adds text."""
        self._content += text.encode()

    def flush(self) -> None:
        """Writes the file."""
        started = time.monotonic()
        self._path.write_bytes(bytes(self._content))
        ended = time.monotonic()
        self._next = ended + max(_STORE_FLUSH_S, 20 * (ended - started))

    def flush_now_and_then(self) -> None:
        """Writes the file unless it was written shortly before: a long file takes a while, and steps are many."""
        if time.monotonic() >= self._next:
            self.flush()

    def close(self) -> None:
        """Nothing is left to write: the end of the log is flushed."""


def jsonable(value: Any) -> Any:
    """The same value for JSON, which has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
