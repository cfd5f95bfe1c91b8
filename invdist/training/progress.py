"""Progress of a run for the person who started it: one moving line in a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from invdist.evaluation.tables import METRICS, number
from invdist.training.history import METRICS_FILE, Tail

_LOG_SECONDS = 5.0


class ProgressView:
    """Follows the events of a run folder and shows them, from a thread of its own."""

    def __init__(self, run: Path, out: TextIO | None = None) -> None:
        self._tail, self._out = Tail(run / METRICS_FILE), out or sys.stdout
        self._terminal = self._out.isatty()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)
        self._shown = 0.0

    def __enter__(self) -> ProgressView:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._end.wait(0.3):
            self._show_new()
        self._show_new()
        if self._terminal:
            self._out.write("\r\033[K")
            self._out.flush()

    def _show_new(self) -> None:
        latest = None
        for event in self._tail.new():
            if event["event"] == "step":
                latest = event
            elif (text := _line(event)) is not None:
                self._print(text)
        if latest is not None:
            self._show_step(latest)

    def _show_step(self, event: dict[str, Any]) -> None:
        now = time.monotonic()
        if self._terminal:
            self._out.write(f"\r\033[K{_step(event)}")
            self._out.flush()
        elif now - self._shown >= _LOG_SECONDS:
            self._shown = now
            self._print(_step(event))

    def _print(self, text: str) -> None:
        clear = "\r\033[K" if self._terminal else ""
        self._out.write(f"{clear}{text}\n")
        self._out.flush()


def _step(event: dict[str, Any]) -> str:
    eta = int(event.get("eta_s") or 0)
    return (
        f"epoch {event['epoch']} {event.get('phase', '')} step {event.get('step', 0):,}/{event.get('steps', 0):,}  "
        f"loss {number(event.get('loss'))}  {event.get('rows_per_s', 0):,.0f} rows/s  "
        f"epoch ends in {eta // 60}:{eta % 60:02d}"
    )


def _line(event: dict[str, Any]) -> str | None:
    """What an event other than a step has to say, or None."""
    match event["event"]:
        case "start":
            plan = ", ".join(f"{t['table']} {t['rows']:,} x {t['dim']} {t['sharding']}" for t in event["plan"])
            # The imbalance figures that follow are for the report: here the plan itself is enough.
            stats = event.get("plan_stats", "").partition("Total Perf Imbalance")[0].rstrip()
            ranks = f"{event['world_size']} rank(s), {event['device']}, {event['backend']}"
            return f"{event['method']} on {event['model']}: {ranks}; {plan}\n{stats}".rstrip()
        case "resume":
            return f"continuing from {event['checkpoint']} at step {event['global_step']:,}"
        case "epoch":
            valid = event["valid"]
            metrics = "  ".join(f"{name} {number(valid[name])}" for name in METRICS)
            best = "  (best so far)" if event["improved"] else ""
            directions = "  ".join(f"{name} {count}" for name, count in event["directions"].items())
            return (
                f"epoch {event['epoch']}: loss {event['loss']:.4f}  valid {metrics}  "
                f"{event['rows_per_s']:,.0f} rows/s  {directions}{best}"
            )
        case "stopped":
            return f"stopped as asked, saved at step {event['global_step']:,}"
        case "warning":
            return f"warning: {event['message']}"
    return None
