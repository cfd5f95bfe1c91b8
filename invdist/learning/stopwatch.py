"""Where the time of a run goes, by name."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

import torch


class Stopwatch:
    """Adds up seconds by name: of the host, or of a GPU, by events that are read when the seconds are taken.

    On a GPU the host only launches work, so its clock would tell nothing.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._on_gpu = device is not None and device.type == "cuda"
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Inside, time counts under `name`."""
        return _OnGpu(self, name) if self._on_gpu else _OnHost(self, name)

    def take(self) -> dict[str, float]:
        """The seconds so far; counting starts again from zero. On a GPU it waits for the last event."""
        for name, start, end in self._events:
            end.synchronize()
            self.add(name, start.elapsed_time(end) / 1e3)
        self._events = []
        taken, self.seconds = self.seconds, {}
        return taken

    def add(self, name: str, seconds: float) -> None:
        """Counts `seconds` under `name`."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def add_events(self, name: str, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Counts, later, the time between two events under `name`."""
        self._events.append((name, start, end))


class _OnHost:
    """A class, not a generator: a step has several, and they cost a third of the time."""

    __slots__ = ("_name", "_started", "_watch")

    def __init__(self, watch: Stopwatch, name: str) -> None:
        self._watch, self._name = watch, name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._watch.add(self._name, time.perf_counter() - self._started)


class _OnGpu:
    __slots__ = ("_end", "_name", "_start", "_watch")

    def __init__(self, watch: Stopwatch, name: str) -> None:
        self._watch, self._name = watch, name

    def __enter__(self) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._start.record()

    def __exit__(self, *error: object) -> None:
        self._end.record()
        self._watch.add_events(self._name, self._start, self._end)
