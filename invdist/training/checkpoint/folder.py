"""Finds the checkpoints in a folder: the newest, the best, or the one of a step. Reads only; needs no process group."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable

from invdist.runtime.errors import UserError
from invdist.runtime.files import Folder
from invdist.training.checkpoint.manifest import MANIFEST, DamagedCheckpoint
from invdist.training.checkpoint.reader import CheckpointInfo, open_checkpoint

_log = logging.getLogger(__name__)
COMMITTED = re.compile(r"step-(\d{9}|[1-9]\d{9,14})")
"""Name of the folder of a checkpoint, once all of it is written."""


class CheckpointFolder:
    """The checkpoints in one folder (or URI), which may not be there yet."""

    def __init__(self, folder: str | os.PathLike[str] | Folder) -> None:
        self.folder = folder if isinstance(folder, Folder) else Folder.at(folder)

    def select(self, which: str | int = "best") -> CheckpointInfo:
        """The checkpoint that a user asked for: `best` (the newest if none has a metric), `last`, or a step.

        Never another one instead: `UserError` with the steps there are if it does not exist, `DamagedCheckpoint` with
        the intact ones if it is damaged. Checksums are compared when its tensors are read.
        """
        found = {step: info for step in self.steps() if (info := self._try(step, whole=False)) is not None}
        for step in self.steps() if self.folder.local else ():  # on a local disk a rename commits the whole folder
            found.setdefault(step, DamagedCheckpoint(f"{self._at(step)} has no {MANIFEST}"))
        if not found:
            raise UserError(f"{self.folder} has no checkpoint: nothing was trained to the end of an epoch yet")
        read = {step: info for step, info in found.items() if isinstance(info, CheckpointInfo)}
        unclear = ""
        if which == "last":
            step = max(found)
        elif which == "best":
            best = next(iter(best_first(list(read.values()))), None)
            step = next((step for step, info in read.items() if info is best), max(found))
            if len(read) < len(found):  # the metric of one is not known: it may have been the best
                step = min(found.keys() - read.keys())
                unclear = " (so which one is the best is not known)"
        elif str(which).isdecimal() and int(which) in found:
            step = int(which)
        else:
            raise UserError(f"--checkpoint {which}: expected best, last or a step of {self.folder}: {_listed(found)}")
        others = sorted(other for other in read if other != step and isinstance(self._try(other), CheckpointInfo))
        advice = f"choose an intact one with --checkpoint STEP: {_listed(others)}" if others else "no other is intact"
        chosen = self._try(step) or found[step]
        if not isinstance(chosen, CheckpointInfo):
            raise DamagedCheckpoint(f"{chosen}{unclear}; {advice}")
        chosen.advice = advice
        return chosen

    def steps(self) -> list[int]:
        """The steps of all committed checkpoints in order, damaged ones included."""
        try:
            return sorted(int(name[5:]) for name in self.folder.folders() if COMMITTED.fullmatch(name))
        except OSError as error:
            raise UserError(f"cannot look into {self.folder}: {error}") from error

    def list(self) -> list[CheckpointInfo]:
        """All committed checkpoints, oldest first; raises `DamagedCheckpoint` for one that is damaged."""
        return [info for step in self.steps() if (info := open_checkpoint(self._at(step))) is not None]

    def latest(self, *, valid_only: bool = False) -> CheckpointInfo | None:
        """The newest checkpoint, None if there is none.

        Raises `DamagedCheckpoint` if the newest is damaged; `valid_only` skips damaged ones instead. Checksums are
        compared by `load`.
        """
        if valid_only:
            return next(iter(reversed(self.intact())), None)
        opened = (open_checkpoint(self._at(step)) for step in reversed(self.steps()))
        return next((info for info in opened if info is not None), None)

    def best(self) -> CheckpointInfo | None:
        """The intact checkpoint with the best metric, None if none has one."""
        return next(iter(best_first(self.intact())), None)

    def newest_step(self) -> int | None:
        """The step of the newest checkpoint, damaged or not."""
        return max(self.steps(), default=None)

    def intact(self) -> list[CheckpointInfo]:
        """The checkpoints that are not damaged, oldest first; each damaged one is logged."""
        found = []
        for step in self.steps():
            info = self._try(step)
            if isinstance(info, UserError):
                _log.warning("skipped: %s", info)
            elif info is not None:
                found.append(info)
        return found

    def _at(self, step: int) -> Folder:
        return self.folder.child(folder_name(step))

    def _try(self, step: int, *, whole: bool = True) -> CheckpointInfo | UserError | None:
        """The checkpoint of a step, or what is wrong with it; None if it was never committed."""
        try:
            return open_checkpoint(self._at(step), whole=whole)
        except UserError as error:
            return error


def folder_name(step: int) -> str:
    """The name of the folder of a checkpoint."""
    return f"step-{step:09d}"


def best_first(found: list[CheckpointInfo]) -> list[CheckpointInfo]:
    """Those with a metric, best first; of equals the older, which the training loop calls the best epoch."""
    measured = [(-info.metric, info.step, info) for info in found if info.metric is not None]
    return [info for *_, info in sorted(measured, key=lambda entry: entry[:2])]


def _listed(steps: Iterable[int]) -> str:
    return ", ".join(map(str, steps))
