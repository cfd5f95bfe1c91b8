"""Metrics of the service through Ray, which adds up those of all processes of a node and shows them to Prometheus."""

from __future__ import annotations

from typing import Any

_SECONDS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0]
_ROWS = [1, 10, 100, 256, 1000, 4096, 16384]


class ServiceMetrics:
    """What a replica counts. Names begin with `ray_invdist_serve_` on the page."""

    def __init__(self) -> None:
        from ray.serve import metrics as declared

        metrics: Any = declared  # its types allow one tag only

        self._requests = metrics.Counter("invdist_serve_requests", "Answers by route and status.", ("route", "status"))
        self._rows = metrics.Counter("invdist_serve_rows", "Rows of answers by route.", ("route",))
        self._seconds = metrics.Histogram("invdist_serve_seconds", "Time to an answer.", _SECONDS, ("route",))
        self._batches = metrics.Histogram("invdist_serve_batch_rows", "Rows that were scored at once.", _ROWS)
        self._step = metrics.Gauge("invdist_serve_checkpoint_step", "Training steps of the checkpoint in use.")

    def observe(self, route: str, status: int, seconds: float, rows: int) -> None:
        """Counts an answer."""
        self._requests.inc(1, {"route": route, "status": str(status)})
        self._seconds.observe(seconds, {"route": route})
        if rows:
            self._rows.inc(rows, {"route": route})

    def batch(self, rows: int) -> None:
        """Counts a batch."""
        self._batches.observe(rows)

    def checkpoint(self, step: int) -> None:
        """Notes which checkpoint is in use."""
        self._step.set(step)
