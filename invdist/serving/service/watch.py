"""Follows the checkpoints of a run: which one should be served now."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from invdist.runtime.errors import UserError
from invdist.serving.run import TrainedRun, open_run
from invdist.training import run_folder
from invdist.training.checkpoint.folder import CheckpointFolder


class CheckpointWatcher:
    """Opens the checkpoint `which` (`best`, `last` or a step) of a run whenever it is another one than before.

    `run` may be a link that is pointed at another run, such as that of the next day.
    """

    def __init__(self, run: str | Path, overrides: Sequence[str] = (), which: str | int = "best") -> None:
        self._run, self._overrides, self._which = run, list(overrides), which
        self._listed: object = None
        self._chosen: object = None

    def changed(self) -> TrainedRun | None:
        """The run with its new checkpoint, None if it is the one of the last call.

        Looks at names first: a folder without a new checkpoint costs one listing. Raises `UserError` if the checkpoint
        cannot be opened; the next call tries again.
        """
        folder = Path(self._run).resolve()
        config, _ = run_folder.reopen(folder, self._overrides)
        store = CheckpointFolder(run_folder.checkpoints(config, folder))
        listed = (folder, store.steps())
        if listed == self._listed:
            return None
        info = store.select(self._which)
        chosen = (folder, info.path, sorted(entry.sha256 for entry in info.manifest.files.values()))
        opened = None
        if chosen != self._chosen:
            opened = open_run(folder, self._overrides, self._which)
            if opened.checkpoint.step != info.step:
                raise UserError(f"{store.folder} changed while it was read")
        self._listed, self._chosen = listed, chosen
        return opened
