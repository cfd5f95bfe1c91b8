"""Reads a checkpoint: any rectangle of any tensor. Each file is compared with its checksum before it is used."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from invdist.runtime.errors import UserError
from invdist.runtime.files import Folder
from invdist.training.checkpoint.manifest import DTYPES, MANIFEST, DamagedCheckpoint, Manifest, Part, Position, parse

_MOST_MANIFEST = 64 << 20
_MOST_FILE = 1 << 30  # the writer's files are far smaller
_CACHE_BYTES = 256 << 20


class CheckpointInfo:
    """A committed checkpoint: its manifest is valid and its files have the right sizes."""

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.advice = "use an older checkpoint"
        """What to do if a file turns out to be damaged, for the message."""
        self.cache_bytes = _CACHE_BYTES
        """Read files that are kept, the last one always: 0 for a process that reads each row once."""
        self._cache: dict[str, dict[str, Tensor]] = {}

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

    def read_into(self, name: str, target: Tensor, row: int = 0, column: int = 0) -> None:
        """Fills `target` (`[rows, columns]`, any device) with the rectangle of a tensor that starts at `row`, `column`.

        Only the files that hold some of it are read.
        """
        bottom, right = row + target.shape[0], column + target.shape[1]
        for part in self.manifest.tensors[name].parts:
            a, b = max(row, part.row), min(bottom, part.row + part.rows)
            c, d = max(column, part.column), min(right, part.column + part.columns)
            if a < b and c < d:
                source = self._part(name, part)[a - part.row : b - part.row, c - part.column : d - part.column]
                target[a - row : b - row, c - column : d - column].copy_(source)

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
        for name in sorted(self.manifest.files)[part::parts]:
            self._file(name)

    def _part(self, name: str, part: Part) -> Tensor:
        """A part as a matrix."""
        entry = self.manifest.tensors[name]
        found = self._file(part.file).get(part.key)
        if found is None or found.dtype != DTYPES[entry.dtype] or found.shape != entry.part_shape(part):
            raise DamagedCheckpoint(f"{self.path}/{part.file} does not hold {name} as the manifest says")
        return found.view(part.rows, part.columns)

    def _file(self, name: str) -> dict[str, Tensor]:
        """The tensors of a file, after its checksum; the last few files are kept."""
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
        self._cache[name] = tensors
        while sum(self.manifest.files[kept].bytes for kept in self._cache) > self.cache_bytes and len(self._cache) > 1:
            del self._cache[next(iter(self._cache))]
        return tensors


def decode(content: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file; `ValueError` for anything that is not one."""
    try:
        return safetensors.torch.load(content)
    except Exception as error:  # the library has its own exception, and lets others out of malformed headers
        raise ValueError(str(error)) from error


def open_checkpoint(folder: Folder, *, whole: bool = True) -> CheckpointInfo | None:
    """The checkpoint in a folder, None if none was committed there; `DamagedCheckpoint` if its manifest is wrong.

    With `whole` (the default) its files must also be there and have the right sizes.
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
    return CheckpointInfo(folder, manifest)


def read_checkpoint(path: str | os.PathLike[str]) -> CheckpointInfo:
    """Opens the checkpoint at a path or URI for reading; needs no process group."""
    info = open_checkpoint(Folder.at(path))
    if info is None:
        raise UserError(
            f"{path} is not a checkpoint: it has no {MANIFEST} (an interrupted save leaves none); "
            "expected a folder such as runs/NAME/checkpoints/step-000000123"
        )
    return info
