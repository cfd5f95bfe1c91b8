"""Wall time while trials of a study ran, over all its sessions: less than the sum of trials that run side by side."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

from invdist.runtime.files import write_atomically


class Stopwatch:
    """The wall time of the study in `folder`, kept there. A session that is killed counts up to its last `note`."""

    def __init__(self, folder: Path) -> None:
        self._file, self._since = folder / "wall.json", 0.0
        self.seconds: float | None = None if (folder / "trials").exists() else 0.0
        """None: the study has trials of a version that did not measure it."""
        if self._file.exists():
            self.seconds = json.loads(self._file.read_text())["seconds"]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside, time counts."""
        self._since = time.monotonic()
        self.note()  # a session that is killed before its first trial ends was timed, too
        try:
            yield
        finally:
            self.note()

    def note(self) -> None:
        """Writes the time up to now."""
        now = time.monotonic()
        if self.seconds is not None:
            self.seconds += now - self._since
            write_atomically(self._file, json.dumps({"seconds": self.seconds}))
        self._since = now
