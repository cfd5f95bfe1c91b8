"""Writes the events of a run: `metrics.jsonl`, and the same for TensorBoard."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from invdist.training.history import METRICS_FILE, end_of_last_line
from invdist.training.tensorboard import Writer


class EventLog:
    """Writes a run's events. Only the first rank writes; on the others, calls do nothing."""

    def __init__(self, run: Path, writes: bool) -> None:
        self._file = self._board = None
        if writes:
            run.mkdir(parents=True, exist_ok=True)
            path = run / METRICS_FILE
            self._file = path.open("a", encoding="utf-8")
            # A killed writer may have left part of a line: the next event must start on a new one.
            self._file.truncate(end_of_last_line(path))
            self._board = Writer(run)

    def write(self, kind: str, **fields: Any) -> None:
        """Adds one event, which readers see at once."""
        if self._file is None or self._board is None:
            return
        event = {"event": kind, "time": time.time(), **jsonable(fields)}
        self._file.write(json.dumps(event, allow_nan=False) + "\n")
        self._file.flush()
        self._board.write(event)

    def close(self) -> None:
        """Closes both files."""
        if self._file is not None and self._board is not None:
            self._file.close()
            self._board.close()
            self._file = self._board = None


def jsonable(value: Any) -> Any:
    """The same value for JSON, which has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
