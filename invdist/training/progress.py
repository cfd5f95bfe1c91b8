"""Shows the progress of a run while it trains, from its events: a moving line in a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import threading
from typing import Any, TextIO

from invdist.evaluation.tables import METRICS, number
from invdist.runtime.paths import AnyPath
from invdist.runtime.progress import ProgressLine
from invdist.training.history import METRICS_FILE, Tail

_POLL_SECONDS = 0.3
_LOG_SECONDS = 5.0


class ProgressView:
    """Follows the events of a run folder in a thread and shows them on `out` (default: stdout)."""

    def __init__(self, run: AnyPath, out: TextIO | None = None) -> None:
        self._tail = Tail(run / METRICS_FILE)
        self._line = ProgressLine(out or sys.stdout, _LOG_SECONDS)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)

    def __enter__(self) -> ProgressView:
        self._line.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()
        self._line.__exit__(*error)

    def _follow(self) -> None:
        while not self._end.wait(_POLL_SECONDS):
            self._show_new()
        self._show_new()

    def _show_new(self) -> None:
        step = None
        for event in self._tail.new():
            if event["event"] == "step" or (event["event"] == "vectors" and event["product"] < event["products"]):
                step = event
            elif (text := describe(event)) is not None:
                self._line.print(text)
                step = None  # it belongs to what was just summed up
        if step is not None and step["event"] == "vectors":
            self._line.show(_describe_product(step), step["product"], step["products"])
        elif step is not None:
            self._line.show(_describe_step(step), step.get("step", 0), step.get("steps"))


def describe(event: dict[str, Any]) -> str | None:
    """The lines that an event other than a step adds to the log, or None."""
    match event["event"]:
        case "start":
            ranks = f"{event['world_size']} rank(s), {event['device']}, {event['backend']}"
            tables = (f"  {t['table']}: {t['rows']:,} x {t['dim']}, {t['sharding']}" for t in event["plan"])
            return "\n".join([f"{event['method']} on {event['model']}: {ranks}", *tables])
        case "vectors" if event["product"] == event["products"]:
            return f"{_describe_product(event)}; learned from {event['exposures']:,} exposures"
        case "grown":
            ids = (
                f"{event[f'known_{kind}']:,} {kind} known, {event[f'new_{kind}']:,} new, "
                f"{event[f'dropped_{kind}']:,} dropped"
                for kind in ("users", "items")
            )
            return f"going on from {event['checkpoint']}: {'; '.join(ids)}"
        case "resume":
            return f"continuing from {event['checkpoint']} at step {event['global_step']:,}"
        case "epoch":
            valid = event["valid"]
            metrics = "  ".join(f"{name} {number(valid[name])}" for name in METRICS)
            best = "  (best so far)" if event.get("improved") else ""
            directions = "  ".join(f"{name} {count}" for name, count in event["directions"].items())
            return (
                f"epoch {event['epoch']}: loss {number(event['loss'])}  valid {metrics}  "
                f"{event['rows_per_s']:,.0f} rows/s  {directions}{best}"
            )
        case "stopped":
            return f"stopped as requested, saved at step {event['global_step']:,}"
        case "warning":
            return f"warning: {event['message']}"
    return None


def _describe_product(event: dict[str, Any]) -> str:
    return f"exposure vectors: product {event['product']} of {event['products']}, {event['seconds']:.1f} s"


def _describe_step(event: dict[str, Any]) -> str:
    eta = int(event.get("eta_s") or 0)
    return (
        f"epoch {event['epoch']} {event.get('phase', '')} step {event.get('step', 0):,}/{event.get('steps', 0):,}  "
        f"loss {number(event.get('loss'))}  {event.get('rows_per_s', 0):,.0f} rows/s  "
        f"epoch ends in {eta // 60}:{eta % 60:02d}"
    )
