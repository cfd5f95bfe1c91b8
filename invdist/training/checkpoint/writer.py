"""Copies pieces out of the way of training, and writes them as safetensors files of bounded size."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from invdist.runtime.files import Folder
from invdist.training.checkpoint import safetensors
from invdist.training.checkpoint.pieces import Piece

_FILE_BYTES = 64 << 20
_SMALL_BYTES = 1 << 20


class Snapshot:
    """Copies in memory, whose room is kept from save to save: the first use of fresh memory is the slow part."""

    def __init__(self) -> None:
        self._room: dict[str, Tensor] = {}

    def take(self, pieces: Iterable[Piece]) -> list[Piece]:
        """The same pieces over copies in main memory."""
        taken, room = [], {}
        for piece in pieces:
            key = f"{piece.name}@{piece.row},{piece.column}"
            copy = self._room.get(key)
            if copy is None or copy.shape != piece.values.shape or copy.dtype != piece.values.dtype:
                copy = torch.empty(piece.values.shape, dtype=piece.values.dtype, pin_memory=piece.values.is_cuda)
            room[key] = copy.copy_(piece.values.detach(), non_blocking=True)
            taken.append(dataclasses.replace(piece, values=copy))
        if any(copy.is_pinned() for copy in room.values()):
            torch.cuda.synchronize()
        self._room = room
        return taken


def write_pieces(folder: Folder, rank: int, pieces: Iterable[Piece]) -> dict[str, Any]:
    """Writes the pieces of one rank; gives the `tensors` and `files` of the manifest that they make, as plain data.

    A large piece becomes files of its own, cut by rows; the small ones of a rank share a file.
    """
    tensors: dict[str, dict[str, Any]] = {}
    files: dict[str, dict[str, Any]] = {}
    small: dict[str, Tensor] = {}
    shared = f"rank-{rank}.safetensors"
    for piece in pieces:
        entry = {"dtype": safetensors.NAMES[piece.values.dtype], "shape": list(piece.shape), "parts": []}
        parts = tensors.setdefault(piece.name, entry)["parts"]
        for row, values in _cut(piece):
            rows = len(values) if values.dim() else 1
            columns = values.numel() // rows
            key = piece.name
            if rows * columns < math.prod(piece.shape):
                key += f"[{row}:{row + rows},{piece.column}:{piece.column + columns}]"
            if values.numel() * values.element_size() < _SMALL_BYTES:
                name = shared
                small[key] = values.cpu()
            else:
                name = re.sub(r"[^A-Za-z0-9]+", "-", key).strip("-") + ".safetensors"
                files[name] = _write(folder, name, {key: values.cpu()})
            parts.append(
                dict(file=name, key=key, row=row, rows=rows, column=piece.column, columns=columns)  # noqa: C408
            )
    files[shared] = _write(folder, shared, small)
    return {"tensors": tensors, "files": files}


def merge(reports: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What all ranks wrote, as one."""
    merged: dict[str, Any] = {"tensors": {}, "files": {}}
    for report in reports:
        merged["files"] |= report["files"]
        for name, entry in report["tensors"].items():
            merged["tensors"].setdefault(name, {**entry, "parts": []})["parts"] += entry["parts"]
    return merged


def _cut(piece: Piece) -> Iterable[tuple[int, Tensor]]:
    """Ranges of rows that fill one file each, with the row each starts at."""
    values = piece.values
    if values.numel() == 0:
        return
    if values.numel() * values.element_size() <= _FILE_BYTES or values.dim() == 0:
        yield piece.row, values
        return
    rows = max(1, _FILE_BYTES * len(values) // (values.numel() * values.element_size()))
    for start in range(0, len(values), rows):
        yield piece.row + start, values[start : start + rows]


def _write(folder: Folder, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with folder.create(name) as file:
        for content in safetensors.encode(tensors):
            digest.update(content)
            file.write(content)
            size += len(content)
    return {"bytes": size, "sha256": digest.hexdigest()}
