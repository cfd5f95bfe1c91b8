"""Reads a checkpoint: any rectangle of any tensor. Each file is compared with its checksum before it is used.

A delta is read like a full checkpoint: the rows that did not change come from its base.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from invdist.embeddings.placement import ids_at
from invdist.runtime.errors import UserError
from invdist.runtime.files import Folder
from invdist.training.checkpoint.manifest import (
    DTYPES,
    MANIFEST,
    Base,
    ChangedRows,
    DamagedCheckpoint,
    Manifest,
    Part,
    Position,
    parse,
)

_MOST_MANIFEST = 64 << 20
_MOST_FILE = 1 << 30  # the writer's files are far smaller
_CACHE_BYTES = 256 << 20
_MOST_THREADS = 4  # each has a file in memory


class CheckpointInfo:
    """A committed checkpoint: its manifest is valid and its files have the right sizes.

    `base` is the full checkpoint that a delta needs.
    """

    def __init__(self, folder: Folder, manifest: Manifest, base: CheckpointInfo | None = None) -> None:
        self.folder, self.manifest, self.base = folder, manifest, base
        self.advice = "use an older checkpoint"
        """What to do if a file turns out to be damaged, for the message."""
        self.cache_bytes = _CACHE_BYTES
        """Read files that are kept, the last one always: 0 for a process that reads each row once."""
        self._cache: dict[str, dict[str, Tensor]] = {}
        self._lock = threading.Lock()
        self._sorted: set[tuple[str, str]] = set()

    @property
    def path(self) -> str:
        """Where it is."""
        return str(self.folder)

    @property
    def step(self) -> int:
        """Steps of training it has seen."""
        return self.manifest.position.global_step

    @property
    def position(self) -> Position:
        """Where training continues."""
        return self.manifest.position

    @property
    def metric(self) -> float | None:
        """The metric it was saved with, if any."""
        return self.manifest.metric

    @property
    def extra(self) -> dict[str, Any]:
        """What the caller of `save` gave."""
        return self.manifest.extra

    def names(self, prefix: str) -> list[str]:
        """What follows `prefix` in the names of tensors that begin with it."""
        return [name[len(prefix) :] for name in self.manifest.tensors if name.startswith(prefix)]

    def read(self, name: str) -> Tensor:
        """A whole tensor."""
        entry = self.manifest.tensors[name]
        whole = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        self.read_into(name, whole.view(entry.rows, entry.columns))
        return whole

    def read_into(self, name: str, target: Tensor, row: int = 0, column: int = 0, multiplier: int = 1) -> None:
        """Fills `target` (`[rows, columns]`, any device) with the rectangle of a tensor that starts at `row`, `column`.

        Only the files that hold some of it are read. Rows are counted by id, or by place with the `multiplier` of a
        layout; where the checkpoint was saved with another one, all files of the tensor are read.
        """
        entry = self.manifest.tensors[name]
        if entry.multiplier == multiplier:
            self._read_stored(name, target, row, column)
            return
        ids = ids_at(row, row + target.shape[0], entry.rows, multiplier)
        self._gather_stored(name, target, ids * entry.multiplier % max(1, entry.rows), column)

    def _gather_stored(self, name: str, target: Tensor, places: Tensor, column: int) -> None:
        """Fills `target` with the stored rows `places`."""
        right, entry = column + target.shape[1], self.manifest.tensors[name]

        def fill(part: Part | ChangedRows) -> None:
            c, d = max(column, part.column), min(right, part.column + part.columns)
            if c >= d:
                return
            if isinstance(part, Part):
                wanted = ((places >= part.row) & (places < part.row + part.rows)).nonzero().view(-1)
                at = places[wanted] - part.row
            else:
                index = self._index(name, part)
                at = torch.searchsorted(index, places).clamp_(max=max(0, len(index) - 1))
                wanted = (index[at] == places).nonzero().view(-1) if len(index) else at[:0]
                at = at[wanted]
            source = self._part(name, part)[:, c - part.column : d - part.column].index_select(0, at)
            target[:, c - column : d - column].index_copy_(0, wanted.to(target.device), source.to(target.device))

        if entry.changed is not None:
            assert self.base is not None, "opened without its base"
            self.base._gather_stored(name, target, places, column)
            _in_threads(fill, entry.changed)
        _in_threads(fill, entry.parts)

    def _read_stored(self, name: str, target: Tensor, row: int, column: int) -> None:
        """Fills `target` with a rectangle of a tensor as it is stored."""
        bottom, right = row + target.shape[0], column + target.shape[1]
        entry = self.manifest.tensors[name]

        def fill(part: Part) -> None:
            a, b = max(row, part.row), min(bottom, part.row + part.rows)
            c, d = max(column, part.column), min(right, part.column + part.columns)
            if a < b and c < d:
                source = self._part(name, part)[a - part.row : b - part.row, c - part.column : d - part.column]
                target[a - row : b - row, c - column : d - column].copy_(source)

        def replace(changed: ChangedRows) -> None:
            c, d = max(column, changed.column), min(right, changed.column + changed.columns)
            if c >= d:
                return
            index = self._index(name, changed)
            low, high = torch.searchsorted(index, torch.tensor([row, bottom])).tolist()
            if low < high:
                source = self._part(name, changed)[low:high, c - changed.column : d - changed.column]
                places = (index[low:high] - row).to(target.device)
                target[:, c - column : d - column].index_copy_(0, places, source.to(target.device))

        if entry.changed is not None:
            assert self.base is not None, "opened without its base"
            self.base._read_stored(name, target, row, column)
            _in_threads(replace, entry.changed)
        _in_threads(fill, entry.parts)

    def read_rows(self, table: str, rows: slice) -> np.ndarray:
        """Rows of a table (`rows` without a step), all columns: `[n, columns]`."""
        entry = self.manifest.tensors.get(f"rows/{table}/weight")
        if entry is None:
            known = ", ".join(t.name for t in self.manifest.tables)
            raise UserError(f"{self.path} has no table {table!r}; it has {known}")
        first, end, step = rows.indices(entry.rows)
        assert step == 1, "a range of rows"
        found = torch.empty((max(0, end - first), entry.columns), dtype=DTYPES[entry.dtype])
        self.read_into(f"rows/{table}/weight", found, first)
        return found.numpy()

    def read_dense(self) -> dict[str, Tensor]:
        """The dense weights by name, as `backbone.load_state_dict` wants them."""
        return {name: self.read(f"dense/{name}") for name in self.names("dense/")}

    def read_strategy_state(self) -> dict[str, Tensor]:
        """The replicated state of the strategy, as `strategy.load_state` wants it."""
        return {name: self.read(f"strategy/{name}") for name in self.names("strategy/")}

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Compares every file with its checksum, also those nobody reads; `DamagedCheckpoint` if one differs.

        Of `parts` processes that divide the files, this is number `part`.
        """
        _in_threads(self._file, sorted(self.manifest.files)[part::parts])
        if self.base is not None:
            self.base.verify(part, parts)

    def checksums(self) -> list[str]:
        """The names and checksums of all files, in order; those of the base of a delta after its own."""
        mine = sorted(f"{name} {entry.sha256}" for name, entry in self.manifest.files.items())
        return mine + (self.base.checksums() if self.base is not None else [])

    def _part(self, name: str, part: Part | ChangedRows) -> Tensor:
        """A part as a matrix."""
        entry = self.manifest.tensors[name]
        found = self._file(part.file).get(part.key)
        if found is None or found.dtype != DTYPES[entry.dtype] or found.shape != entry.part_shape(part):
            raise DamagedCheckpoint(f"{self.path}/{part.file} does not hold {name} as the manifest says")
        return found.view(part.rows, part.columns)

    def _index(self, name: str, changed: ChangedRows) -> Tensor:
        """The numbers of changed rows, ascending."""
        found = self._file(changed.file).get(changed.index)
        if found is None or found.dtype != torch.int64 or found.shape != (changed.rows,):
            raise DamagedCheckpoint(f"{self.path}/{changed.file} does not hold the changed rows of {name}")
        if (changed.file, changed.index) not in self._sorted:  # looked at once: the checksum says it stays the same
            rows = self.manifest.tensors[name].rows
            if len(found) and (found[0] < 0 or found[-1] >= rows or (found[1:] <= found[:-1]).any()):
                raise DamagedCheckpoint(f"{self.path}/{changed.file}: changed rows of {name} are not ascending rows")
            self._sorted.add((changed.file, changed.index))
        return found

    def _file(self, name: str) -> dict[str, Tensor]:
        """The tensors of a file, after its checksum; the last few files are kept."""
        with self._lock:
            if name in self._cache:
                self._cache[name] = self._cache.pop(name)
                return self._cache[name]
        where, expected = f"{self.path}/{name}", self.manifest.files[name]
        if expected.bytes > _MOST_FILE:
            raise DamagedCheckpoint(f"{where} is larger than any file of a checkpoint")
        try:
            with self.folder.open(name) as file:
                content = file.read(expected.bytes + 1)
        except OSError as error:
            raise DamagedCheckpoint(f"cannot read {where}: {error}") from error
        if len(content) != expected.bytes or hashlib.sha256(content).hexdigest() != expected.sha256:
            raise DamagedCheckpoint(f"{where} is damaged: its checksum is not the manifest's; {self.advice}")
        try:
            tensors = decode(content)
        except ValueError as error:
            raise DamagedCheckpoint(f"{where} is not a safetensors file: {error}") from error
        with self._lock:
            self._cache[name] = tensors
            size = self.manifest.files
            while sum(size[kept].bytes for kept in self._cache) > self.cache_bytes and len(self._cache) > 1:
                del self._cache[next(iter(self._cache))]
        return tensors


def _in_threads(action: Callable[[Any], object], each: Sequence[Any]) -> None:
    """Calls `action` with each in turn, on as many threads as torch has here: hashing and reading release the lock."""
    threads = min(len(each), torch.get_num_threads(), _MOST_THREADS)
    if threads <= 1:
        for one in each:
            action(one)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(action, each):
            pass


def decode(content: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file; `ValueError` for anything that is not one."""
    try:
        return safetensors.torch.load(content)
    except Exception as error:  # the library has its own exception, and lets others out of malformed headers
        raise ValueError(str(error)) from error


def open_checkpoint(folder: Folder, *, whole: bool = True) -> CheckpointInfo | None:
    """The checkpoint in a folder, None if none was committed there; `DamagedCheckpoint` if its manifest is wrong.

    With `whole` (the default) its files must also be there and have the right sizes, and those of a delta's base.
    """
    try:
        sizes = folder.files()
        if MANIFEST not in sizes:
            return None
        if sizes[MANIFEST] > _MOST_MANIFEST:
            raise DamagedCheckpoint(f"{folder}/{MANIFEST} has {sizes[MANIFEST]} bytes, more than any manifest")
        with folder.open(MANIFEST) as file:
            text = file.read(_MOST_MANIFEST)
    except OSError as error:
        raise DamagedCheckpoint(f"cannot read {folder}: {error}") from error
    manifest = parse(text, f"{folder}/{MANIFEST}")
    for name, entry in manifest.files.items() if whole else ():
        if name not in sizes:
            raise DamagedCheckpoint(f"{folder}/{name} is missing (or not a plain file)")
        if sizes[name] != entry.bytes:
            raise DamagedCheckpoint(f"{folder}/{name} has {sizes[name]} bytes, the manifest says {entry.bytes}")
    base = _open_base(folder, manifest, manifest.base) if whole and manifest.base is not None else None
    return CheckpointInfo(folder, manifest, base)


def _open_base(folder: Folder, manifest: Manifest, needed: Base) -> CheckpointInfo:
    """The full checkpoint that a delta was made from; `DamagedCheckpoint` if it is not there as it was then."""
    beside = folder.parent()
    path = beside.child(needed.name)
    try:
        there = needed.name in beside.folders() and MANIFEST in path.files()
        digest = checksum_of(path) if there else None
    except OSError as error:
        raise DamagedCheckpoint(f"cannot read {path}, which {folder} needs: {error}") from error
    if digest != needed.sha256:
        state = "is not the checkpoint it was made from" if there else "is not there"
        raise DamagedCheckpoint(f"{folder} holds changes of {path}, which {state}: keep both together")
    base = open_checkpoint(path)
    assert base is not None
    if base.manifest.base is not None:
        raise DamagedCheckpoint(f"{folder} holds changes of {path}, which is no full checkpoint")
    for name, entry in manifest.tensors.items():
        below = base.manifest.tensors.get(name)
        same = below is not None and all(
            getattr(below, key) == getattr(entry, key) for key in ("dtype", "shape", "multiplier")
        )
        if entry.changed is not None and not same:
            raise DamagedCheckpoint(f"{folder}: {path} has no {name} of the same size")
    return base


def checksum_of(folder: Folder) -> str:
    """The hash of the manifest of a checkpoint."""
    with folder.open(MANIFEST) as file:
        return hashlib.sha256(file.read(_MOST_MANIFEST)).hexdigest()


def read_checkpoint(path: str | os.PathLike[str]) -> CheckpointInfo:
    """Opens the checkpoint at a path or URI for reading; needs no process group."""
    info = open_checkpoint(Folder.at(path))
    if info is None:
        raise UserError(
            f"{path} is not a checkpoint: it has no {MANIFEST} (an interrupted save leaves none); "
            "expected a folder such as runs/NAME/checkpoints/step-000000123"
        )
    return info
