"""Saves the checkpoints of a run in the background, commits them whole or not at all, and removes old ones.

A checkpoint is written into `step-000000123.partial/`; when all ranks are done, rank 0 writes the manifest and
renames the folder to `step-000000123/`. An object store (`s3://`) cannot rename a folder: there the files are
written in their final place, and the manifest, written last, commits them. Either way a folder without a manifest is
not a checkpoint.

With `deltas` a save between epochs holds only the table rows that changed since the last full checkpoint, its base. A
base is kept as long as a checkpoint needs it.
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

import torch
from torch import Tensor

from invdist.embeddings.comm import Comm
from invdist.embeddings.store import EmbeddingStore
from invdist.learning.strategy import Strategy
from invdist.models.recommender import Recommender
from invdist.runtime.errors import UserError
from invdist.runtime.files import Folder, describe_os_error
from invdist.training.checkpoint.folder import COMMITTED, CheckpointFolder, best_first, folder_name
from invdist.training.checkpoint.manifest import MANIFEST, DamagedCheckpoint, Position, dump, parse
from invdist.training.checkpoint.ranks import Ranks
from invdist.training.checkpoint.reader import CheckpointInfo, checksum_of
from invdist.training.checkpoint.state import RowSource, TensorSlice, restore, slices_to_save, table_slices
from invdist.training.checkpoint.writer import Snapshot, merge, write_slices

_log = logging.getLogger(__name__)
_PARTIAL = ".partial"
_MOST_THREADS = 8
_LEFTOVER = re.compile(r"step-\d{9,15}(\.old)?\.partial")
_FULL_SHARE = 0.5
"""A delta with more of the table rows than this is saved as a full checkpoint."""
_SHARE = "the folder must be on a filesystem that all ranks share"


class CheckpointStore(CheckpointFolder):
    """Saves and loads the checkpoints in one folder (or URI) that all ranks see.

    Every rank creates one at the same time and calls `save`, `wait` and `load` in step with the others. Larger metrics
    are better. The `keep_last` newest and the `keep_best` best checkpoints are kept, the others removed.
    A save fails if a rank finishes its files more than `timeout_s` after another. With `deltas` only the first
    checkpoint, those with a metric, and those for which most rows changed are full.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | Folder,
        comm: Comm | None,
        *,
        keep_last: int = 2,
        keep_best: int = 1,
        asynchronous: bool = True,
        deltas: bool = False,
        timeout_s: float = 1800.0,
    ) -> None:
        super().__init__(folder)
        self.deltas, self._base = deltas, ""
        self._threads = min(torch.get_num_threads(), _MOST_THREADS)  # asked here: another thread has another number
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
        """Saves the present state. If `asynchronous`, returns after a copy in memory and writes in the background.

        First waits for the previous save and raises its failure, if any. A checkpoint of the same step is replaced.
        """
        self.wait()
        changed = self._changed(model.rows, metric) if self.deltas else None
        head = self._head(model.rows, type(strategy).__name__, position, extra, metric)
        if changed is not None:
            head["base"] = {"name": self._base}
        else:
            self._base = ""
        slices = slices_to_save(model, strategy, changed)
        if self.asynchronous:
            copies = self._snapshot.take(slices)
            self._writing = threading.Thread(target=self._write, args=(head, copies), name="checkpoint", daemon=True)
            self._writing.start()
        else:
            self._write(head, slices)
            self.wait()
        if self.deltas and changed is None:
            model.rows.track()

    def _changed(self, rows: EmbeddingStore, metric: float | None) -> Tensor | None:
        """Which local rows changed since the base, if a delta is to be saved; None for a full checkpoint."""
        if not self._base or metric is not None or rows.changed is None:
            return None
        base = self.folder.child(self._base)
        there = self._ranks.rank > 0 or _attempt(lambda: MANIFEST in base.files()).get("result", False)
        counts = {"there": there, "changed": int(rows.changed.sum()), "rows": len(rows.changed)}
        ranks = self._ranks.gather(counts)
        share = sum(rank["changed"] for rank in ranks) / max(1, sum(rank["rows"] for rank in ranks))
        return rows.changed if share <= _FULL_SHARE and all(rank["there"] for rank in ranks) else None

    def save_tables(self, rows: EmbeddingStore, step: int, extra: dict[str, Any]) -> None:
        """Saves sharded tables alone, as the checkpoint of a step; returns when it is committed."""
        self.wait()
        self._write(self._head(rows, "", Position(global_step=step), extra, None), table_slices(rows))
        self.wait()

    def _head(
        self, rows: EmbeddingStore, strategy: str, position: Position, extra: dict[str, Any], metric: float | None
    ) -> dict[str, Any]:
        """The manifest without its tensors and files."""
        return {
            "position": dataclasses.asdict(position),
            "metric": None if metric is None or math.isnan(metric) else float(metric),
            "extra": json.loads(json.dumps(extra)),  # a copy: the caller goes on changing it
            "strategy": strategy,
            "world_size": self._ranks.size,
            "sharding": dict(rows.layout.sharding),
            "optimizer": type(rows.optimizer).__name__,
            "optimizer_steps": rows.optimizer.steps,
            "tables": [dataclasses.asdict(table) for table in rows.layout.tables],
        }

    def wait(self) -> None:
        """Returns when the last save is committed; raises on every rank if it could not be.

        A `UserError` is for the user to fix; a `RuntimeError` means that another rank is gone.
        """
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write(self, head: dict[str, Any], written: Iterable[TensorSlice]) -> None:
        """All of a save but the copy. A failure on any rank becomes the failure of every rank."""
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
            kind = RuntimeError  # for Ray to fix, by a restart of the ranks
        if failure is None:
            self._base = name if self.deltas and "base" not in head else self._base
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
        """Rank 0 prepares, all ranks write, rank 0 commits; stops at the first failure, which all ranks return."""
        first = self._ranks.rank == 0
        messages = self._ranks.gather(_attempt(prepare) if first else {})
        if _failure(messages) is None:
            messages = self._ranks.gather(_attempt(write))
        if _failure(messages) is None:
            reports = [message["result"] for message in messages]
            messages = self._ranks.gather(_attempt(lambda: commit(reports)) if first else {})
        return _failure(messages)

    def _prepare(self, target: Folder) -> None:
        """Removes what earlier saves left unfinished, and creates the folder to write into."""
        self.folder.make()
        for name in self.folder.folders():
            folder = self.folder.child(name)
            unfinished = not self.folder.local and COMMITTED.fullmatch(name) and MANIFEST not in folder.files()
            if _LEFTOVER.fullmatch(name) or unfinished:
                folder.remove()
        if not self.folder.local:
            self._discard(target)
        target.make()

    def _write_mine(self, target: Folder, written: Iterable[TensorSlice]) -> dict[str, Any]:
        if self.folder.local and _name(target) not in self.folder.folders():
            raise UserError(f"{target}, created by rank 0, is not there; {_SHARE}")
        return write_slices(target, self._ranks.rank, written, self._threads)

    def _commit(self, target: Folder, name: str, content: dict[str, Any]) -> None:
        """Writes the manifest and gives the folder its name; then removes old checkpoints."""
        sizes = target.files()
        for file, entry in content["files"].items():
            if sizes.get(file) != entry["bytes"]:
                raise UserError(f"{file}, written by another rank, is not visible to rank 0; {_SHARE}")
        if "base" in content:
            base = content["base"]["name"]
            content["base"]["sha256"] = checksum_of(self.folder.child(base))
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
        """Removes all but the newest and the best; later ones than `step` belong to a run that was rolled back."""
        present = [info for info in self.intact() if info.step <= step]
        kept = present[-self.keep_last :] + best_first(present)[: self.keep_best]
        needed = {info.base.step for info in kept if info.base is not None}
        for later in self.steps():
            if later > step:
                self._set_aside(folder_name(later))
        for info in reversed(present):  # a delta before its base
            if info not in kept and info.step not in needed:
                self._discard(info.folder)

    def _discard(self, folder: Folder) -> None:
        """Removes a checkpoint. If that is interrupted, what is left does not count as one."""
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
        """Renames a checkpoint so that it no longer counts; on an object store it is removed."""
        if not self.folder.local:
            self._discard(self.folder.child(name))
            return
        self.folder.child(f"{name}.abandoned").remove()
        self.folder.child(name).rename(f"{name}.abandoned")

    # Loading

    def load(
        self,
        info: CheckpointInfo,
        model: Recommender,
        strategy: Strategy,
        *,
        fallback: bool = False,
        by_id: RowSource | None = None,
    ) -> tuple[Position, dict[str, Any]]:
        """Loads a checkpoint into `model` and `strategy`; returns its position and what was saved as `extra`.

        Every rank reads the rows it owns, whatever the number of ranks and the sharding were at the time of saving.
        All ranks succeed or raise together. With `fallback` an older checkpoint is loaded instead of a damaged one;
        a checkpoint of another model is an error either way. `by_id`: see `restore`.
        """
        self.wait()
        self._base = ""  # of rows that are no longer there
        older = [other for other in reversed(self.intact()) if other.step < info.step] if fallback else []
        for candidate in [info, *older]:
            with model.rows.rewriting():
                outcome = _attempt(lambda candidate=candidate: restore(candidate, model, strategy, by_id))
            messages = self._ranks.gather({**outcome, "path": candidate.path})
            if len({message["path"] for message in messages}) > 1:
                raise UserError(f"the ranks do not see the same checkpoints in {self.folder}; {_SHARE}")
            failure = _failure(messages)
            if failure is None:
                return candidate.position, candidate.extra
            if not all(message["damaged"] for message in messages if "failure" in message):
                raise UserError(failure)
            if not fallback:
                break
            _log.warning("skipped for an older checkpoint: %s", failure)
        raise DamagedCheckpoint(failure)


def _name(folder: Folder) -> str:
    return folder.path.rpartition("/")[2]


def _attempt(action: Callable[[], Any]) -> dict[str, Any]:
    """The result of an action or how it failed, as a message to the other ranks."""
    try:
        return {"result": action()}
    except UserError as error:
        return {"failure": str(error), "damaged": isinstance(error, DamagedCheckpoint)}
    except OSError as error:
        return {"failure": describe_os_error(error), "damaged": False}
    except Exception as error:  # report it, or the other ranks would wait forever
        _log.exception("while checkpointing")
        return {"failure": f"{type(error).__name__}: {error}", "damaged": False}


def _failure(messages: list[dict[str, Any]]) -> str | None:
    """The first failure among the messages of all ranks."""
    for rank, message in enumerate(messages):
        if "failure" in message:
            return message["failure"] if len(messages) == 1 else f"rank {rank}: {message['failure']}"
    return None
