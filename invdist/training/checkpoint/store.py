"""The checkpoints of a run: saved in the background, committed whole or not at all, kept as long as they are of use.

A checkpoint is written into `step-000000123.partial/`; when all ranks are done the first one writes the manifest and
renames the folder to `step-000000123/`. A filesystem of objects (`s3://`) cannot rename a folder: there the files are
written in their final place, and the manifest, last, is what commits them. Either way a folder without a manifest is
not a checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Iterable
from typing import Any

from invdist.embeddings.comm import Comm
from invdist.learning.strategy import Strategy
from invdist.models.recommender import Recommender
from invdist.runtime.errors import UserError
from invdist.runtime.files import Folder, describe_os_error
from invdist.training.checkpoint.folder import COMMITTED, CheckpointFolder, best_first, folder_name
from invdist.training.checkpoint.manifest import MANIFEST, DamagedCheckpoint, Position, dump, parse
from invdist.training.checkpoint.pieces import Piece, pieces, restore
from invdist.training.checkpoint.ranks import Ranks
from invdist.training.checkpoint.reader import CheckpointInfo
from invdist.training.checkpoint.writer import Snapshot, merge, write_pieces

_log = logging.getLogger(__name__)
_PARTIAL = ".partial"
_LEFTOVER = re.compile(r"step-\d{9,15}(\.old)?\.partial")
_SHARE = "the folder must be on a filesystem that all ranks share"


class CheckpointStore(CheckpointFolder):
    """Saves and loads the checkpoints in one folder (or URI) that all ranks see.

    Every rank makes one at the same time and calls `save`, `wait` and `load` in step with the others. Larger metrics
    are better. `keep_last` counts the newest, `keep_best` those with the best metrics; the others are removed.
    A rank that has not written its part `timeout_s` after another has makes the save fail.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | Folder,
        comm: Comm | None,
        *,
        keep_last: int = 2,
        keep_best: int = 1,
        asynchronous: bool = True,
        timeout_s: float = 1800.0,
    ) -> None:
        super().__init__(folder)
        self.keep_last, self.keep_best, self.asynchronous = max(1, keep_last), keep_best, asynchronous
        self._ranks = Ranks(comm, timeout_s)
        self._snapshot = Snapshot()
        self._writing: threading.Thread | None = None
        self._failure: Exception | None = None

    # Saving

    def save(
        self,
        model: Recommender,
        strategy: Strategy,
        position: Position,
        extra: dict[str, Any],
        metric: float | None = None,
    ) -> None:
        """Saves everything as it is now. Asynchronous: returns after a copy in memory, and writes in the background.

        Waits for the save before, if that is still being written, and raises what went wrong with it.
        A checkpoint of the same step is replaced.
        """
        self.wait()
        head = {
            "position": dataclasses.asdict(position),
            "metric": None if metric is None or math.isnan(metric) else float(metric),
            "extra": json.loads(json.dumps(extra)),  # as it is now: the caller goes on changing it
            "strategy": type(strategy).__name__,
            "world_size": self._ranks.size,
            "sharding": dict(model.rows.layout.sharding),
            "optimizer": type(model.rows.optimizer).__name__,
            "optimizer_steps": model.rows.optimizer.steps,
            "tables": [dataclasses.asdict(table) for table in model.rows.layout.tables],
        }
        if self.asynchronous:
            copies = self._snapshot.take(pieces(model, strategy))
            self._writing = threading.Thread(target=self._write, args=(head, copies), name="checkpoint", daemon=True)
            self._writing.start()
        else:
            self._write(head, pieces(model, strategy))
            self.wait()

    def wait(self) -> None:
        """Returns when the last save is committed; raises on every rank if it could not be.

        A `UserError` says what to mend; a `RuntimeError` means that another rank is gone.
        """
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write(self, head: dict[str, Any], written: Iterable[Piece]) -> None:
        """All of a save but the copy; what goes wrong on any rank becomes the failure of every rank."""
        step = head["position"]["global_step"]
        name = folder_name(step)
        target = self.folder.child(name + _PARTIAL if self.folder.local else name)
        kind: type[Exception] = UserError
        try:
            failure = self._in_turn(
                lambda: self._prepare(target),
                lambda: self._write_mine(target, written),
                lambda reports: self._commit(target, name, {**head, **merge(reports)}),
            )
        except RuntimeError as error:  # of the process group: another rank is gone
            failure = f"the ranks lost each other: {error}"
            kind = RuntimeError  # not the user's to mend: a restart of the ranks is
        if failure is None:
            return
        if self._ranks.rank == 0:
            _attempt(target.remove)
        last = _attempt(lambda: self.latest(valid_only=True)).get("result")
        kept = f"{last.path} is still good" if last else "there is no other checkpoint"
        self._failure = kind(f"the checkpoint of step {step} was not saved in {self.folder}: {failure}; {kept}")

    def _in_turn(
        self,
        prepare: Callable[[], None],
        write: Callable[[], dict[str, Any]],
        commit: Callable[[list[dict[str, Any]]], None],
    ) -> str | None:
        """The first rank prepares, all write, the first commits; after a failure nothing more is done."""
        first = self._ranks.rank == 0
        words = self._ranks.gather(_attempt(prepare) if first else {})
        if _failure(words) is None:
            words = self._ranks.gather(_attempt(write))
        if _failure(words) is None:
            reports = [word["result"] for word in words]
            words = self._ranks.gather(_attempt(lambda: commit(reports)) if first else {})
        return _failure(words)

    def _prepare(self, target: Folder) -> None:
        """Removes what earlier saves left unfinished, and makes the folder to write into."""
        self.folder.make()
        for name in self.folder.folders():
            folder = self.folder.child(name)
            unfinished = not self.folder.local and COMMITTED.fullmatch(name) and MANIFEST not in folder.files()
            if _LEFTOVER.fullmatch(name) or unfinished:
                folder.remove()
        if not self.folder.local:
            self._discard(target)
        target.make()

    def _write_mine(self, target: Folder, written: Iterable[Piece]) -> dict[str, Any]:
        if self.folder.local and _name(target) not in self.folder.folders():
            raise UserError(f"{target}, made by the first rank, is not there; {_SHARE}")
        return write_pieces(target, self._ranks.rank, written)

    def _commit(self, target: Folder, name: str, content: dict[str, Any]) -> None:
        """Writes the manifest and gives the folder its name; then removes what is no longer to be kept."""
        sizes = target.files()
        for file, entry in content["files"].items():
            if sizes.get(file) != entry["bytes"]:
                raise UserError(f"{file}, written by another rank, is not seen by the first; {_SHARE}")
        text = dump(content)
        parse(text, MANIFEST)
        with target.create(MANIFEST) as file:
            file.write(text)
        if self.folder.local:
            self._discard(self.folder.child(name))
            target.rename(name)
        try:
            self._retain(content["position"]["global_step"])
        except OSError as error:
            _log.warning("old checkpoints in %s could not be removed: %s", self.folder, describe_os_error(error))

    # Keeping

    def _retain(self, step: int) -> None:
        """Removes all but the newest and the best; what lies beyond `step` is of a course that was left."""
        present = [info for info in self.intact() if info.step <= step]
        kept = present[-self.keep_last :] + best_first(present)[: self.keep_best]
        for later in self.steps():
            if later > step:
                self._set_aside(folder_name(later))
        for info in present:
            if info not in kept:
                self._discard(info.folder)

    def _discard(self, folder: Folder) -> None:
        """Removes a checkpoint; whenever that is interrupted, what is left is not taken for one."""
        name = _name(folder)
        if name not in self.folder.folders():
            return
        if folder.local:
            old = self.folder.child(f"{name}.old{_PARTIAL}")
            old.remove()
            folder = folder.rename(_name(old))
        elif MANIFEST in folder.files():
            folder.filesystem.delete_file(f"{folder.path}/{MANIFEST}")
        folder.remove()

    def _set_aside(self, name: str) -> None:
        """Takes a checkpoint out of the count; on a local disk it stays to be looked at."""
        if not self.folder.local:
            self._discard(self.folder.child(name))
            return
        self.folder.child(f"{name}.abandoned").remove()
        self.folder.child(name).rename(f"{name}.abandoned")

    # Loading

    def load(
        self, info: CheckpointInfo, model: Recommender, strategy: Strategy, *, fallback: bool = False
    ) -> tuple[Position, dict[str, Any]]:
        """Puts a checkpoint into `model` and `strategy`; gives its position and what was saved as `extra`.

        Every rank reads the rows it owns, whatever the number of ranks and the sharding were at the time of saving.
        All ranks succeed or raise together. With `fallback` a damaged checkpoint is passed over for the one before it;
        a checkpoint of another model is an error all the same.
        """
        self.wait()
        older = [other for other in reversed(self.intact()) if other.step < info.step] if fallback else []
        for candidate in [info, *older]:
            word = _attempt(lambda candidate=candidate: restore(candidate, model, strategy))
            words = self._ranks.gather({**word, "path": candidate.path})
            if len({word["path"] for word in words}) > 1:
                raise UserError(f"the ranks do not see the same checkpoints in {self.folder}; {_SHARE}")
            failure = _failure(words)
            if failure is None:
                return candidate.position, candidate.extra
            if not all(word["damaged"] for word in words if "failure" in word):
                raise UserError(failure)
            if not fallback:
                break
            _log.warning("passed over for an older checkpoint: %s", failure)
        raise DamagedCheckpoint(failure)


def _name(folder: Folder) -> str:
    return folder.path.rpartition("/")[2]


def _attempt(action: Callable[[], Any]) -> dict[str, Any]:
    """What an action gives or how it fails, as a word to the other ranks."""
    try:
        return {"result": action()}
    except UserError as error:
        return {"failure": str(error), "damaged": isinstance(error, DamagedCheckpoint)}
    except OSError as error:
        return {"failure": describe_os_error(error), "damaged": False}
    except Exception as error:  # said aloud, lest the other ranks wait for a word that never comes
        _log.exception("while checkpointing")
        return {"failure": f"{type(error).__name__}: {error}", "damaged": False}


def _failure(words: list[dict[str, Any]]) -> str | None:
    """The first failure in the words of all ranks."""
    for rank, word in enumerate(words):
        if "failure" in word:
            return word["failure"] if len(words) == 1 else f"rank {rank}: {word['failure']}"
    return None
