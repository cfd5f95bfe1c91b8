"""Where the time of a run goes, by name."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


class Stopwatch:
    """Adds up seconds by name: of the host, or of a GPU, by events that are read when the seconds are taken.

    On a GPU the host only launches work, so its clock would tell nothing.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._on_gpu = device is not None and device.type == "cuda"
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self._on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            try:
                yield
            finally:
                end.record()
                self._events.append((name, start, end))
            return
        started = time.perf_counter()
        try:
            yield
        finally:
            self._add(name, time.perf_counter() - started)

    def take(self) -> dict[str, float]:
        """The seconds so far; counting starts again from zero. On a GPU it waits for the last event."""
        for name, start, end in self._events:
            end.synchronize()
            self._add(name, start.elapsed_time(end) / 1e3)
        self._events = []
        taken, self.seconds = self.seconds, {}
        return taken

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
