"""What a run did, line by line: `metrics.jsonl` for every reader, TensorBoard beside it."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from invdist.training.history import METRICS_FILE
from invdist.training.tensorboard import Writer


class EventLog:
    """Writes a run's events. Only the first rank writes; on the others every call does nothing."""

    def __init__(self, run: Path, writes: bool) -> None:
        self._file = self._board = None
        if writes:
            run.mkdir(parents=True, exist_ok=True)
            _end_broken_line(run / METRICS_FILE)
            self._file = (run / METRICS_FILE).open("a", encoding="utf-8")
            self._board = Writer(run)

    def write(self, kind: str, **fields: Any) -> None:
        """Adds one event and makes it visible at once."""
        if self._file is None or self._board is None:
            return
        event = {"event": kind, "time": time.time(), **jsonable(fields)}
        self._file.write(json.dumps(event, allow_nan=False) + "\n")
        self._file.flush()
        self._board.write(event)

    def close(self) -> None:
        """Ends both files."""
        if self._file is not None and self._board is not None:
            self._file.close()
            self._board.close()
            self._file = self._board = None


def _end_broken_line(path: Path) -> None:
    """Removes what a killed writer left of its last line, so that the next event starts a line of its own."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)


def jsonable(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null."""
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
