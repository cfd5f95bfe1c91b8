"""Follows the checkpoints of a run: which one should be served now."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from invdist.runtime.errors import UserError
from invdist.serving.run import TrainedRun, open_run
from invdist.training import run_folder
from invdist.training.checkpoint.folder import CheckpointFolder

POLL_SECONDS = 1.0
_RETRY_SECONDS = 60.0
"""Until a checkpoint that could not be taken is tried again: all of it is read to compare its checksums."""

_log = logging.getLogger("ray.serve")


class CheckpointWatcher:
    """Opens the checkpoint `which` (`best`, `last` or a step) of a run whenever it is another one than before.

    `run` may be a link that is pointed at another run, such as that of the next day.
    """

    def __init__(self, run: str | Path, overrides: Sequence[str] = (), which: str | int = "best") -> None:
        self._run, self._overrides, self._which = run, list(overrides), which
        self._listed: object = None
        self._chosen: object = None
        self._retry_at = math.inf

    def follow(self, take: Callable[[TrainedRun], None]) -> None:
        """Gives each new checkpoint to `take`, forever. One that cannot be opened or taken is logged."""
        said = ""
        while True:
            time.sleep(POLL_SECONDS)
            try:
                if self.changed(take) is not None:
                    said = ""
            except Exception as error:  # removed meanwhile, damaged, no memory for it: what is served stays
                if said != (said := f"{type(error).__name__}: {error}"):
                    _log.warning("the checkpoint in use stays: %s", said)

    def changed(self, take: Callable[[TrainedRun], None] = lambda run: None) -> TrainedRun | None:
        """The run with its new checkpoint, after `take` has got it; None if it is the one of the last call.

        Looks at names first: a folder without a new checkpoint costs one listing. Raises `UserError` if the checkpoint
        cannot be opened, and what `take` raises. Calls then try again as soon as there is another checkpoint, and this
        one after a minute.
        """
        folder = Path(self._run).resolve()
        config, _ = run_folder.reopen(folder, self._overrides)
        store = CheckpointFolder(run_folder.checkpoints(config, folder))
        listed = (folder, store.steps())
        if listed == self._listed and time.monotonic() < self._retry_at:
            return None
        self._listed, self._retry_at = listed, time.monotonic() + _RETRY_SECONDS
        info = store.select(self._which)
        chosen = (folder, info.path, sorted(entry.sha256 for entry in info.manifest.files.values()))
        opened = None
        if chosen != self._chosen:
            opened = open_run(folder, self._overrides, self._which)
            if opened.checkpoint.step != info.step:
                raise UserError(f"{store.folder} changed while it was read")
            take(opened)
        self._chosen, self._retry_at = chosen, math.inf
        return opened
