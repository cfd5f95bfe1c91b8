"""Copies slices of tensors, so that training can go on, and writes them as safetensors files of bounded size."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from invdist.runtime.files import Folder
from invdist.training.checkpoint.manifest import DTYPE_NAMES
from invdist.training.checkpoint.state import TensorSlice

_FILE_BYTES = 64 << 20
_SMALL_BYTES = 1 << 20
_CHUNK_BYTES = 8 << 20


class Snapshot:
    """Copies in main memory. Their memory is reused from save to save: the first use of new memory is slow."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, slices: Iterable[TensorSlice]) -> list[TensorSlice]:
        """The same slices, over copies of their values."""
        taken, buffers = [], {}
        for slice_ in slices:
            key = f"{slice_.name}@{slice_.row},{slice_.column}"
            copy = self._buffers.get(key)
            if copy is None or copy.shape != slice_.values.shape or copy.dtype != slice_.values.dtype:
                copy = torch.empty(slice_.values.shape, dtype=slice_.values.dtype, pin_memory=slice_.values.is_cuda)
            buffers[key] = copy.copy_(slice_.values.detach(), non_blocking=True)
            taken.append(dataclasses.replace(slice_, values=copy))
        if any(copy.is_pinned() for copy in buffers.values()):
            torch.cuda.synchronize()
        self._buffers = buffers
        return taken


def write_slices(folder: Folder, rank: int, slices: Iterable[TensorSlice]) -> dict[str, Any]:
    """Writes the slices of one rank; returns their `tensors` and `files` for the manifest, as plain data.

    A large slice becomes files of its own, cut by rows; the small ones of a rank share a file.
    """
    tensors: dict[str, dict[str, Any]] = {}
    files: dict[str, dict[str, Any]] = {}
    small: dict[str, Tensor] = {}
    shared = f"rank-{rank}.safetensors"
    for slice_ in slices:
        entry = {"dtype": DTYPE_NAMES[slice_.values.dtype], "shape": list(slice_.shape), "parts": []}
        parts = tensors.setdefault(slice_.name, entry)["parts"]
        for row, values in _cut(slice_):
            rows = len(values) if values.dim() else 1
            columns = values.numel() // rows
            key = slice_.name
            if rows * columns < math.prod(slice_.shape):
                key += f"[{row}:{row + rows},{slice_.column}:{slice_.column + columns}]"
            if values.numel() * values.element_size() < _SMALL_BYTES:
                name = shared
                small[key] = values.cpu()
            else:
                name = re.sub(r"[^A-Za-z0-9]+", "-", key).strip("-") + ".safetensors"
                files[name] = _write(folder, name, {key: values.cpu()})
            parts.append(
                dict(file=name, key=key, row=row, rows=rows, column=slice_.column, columns=columns)  # noqa: C408
            )
    files[shared] = _write(folder, shared, small)
    return {"tensors": tensors, "files": files}


def merge(reports: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The `tensors` and `files` of all ranks."""
    merged: dict[str, Any] = {"tensors": {}, "files": {}}
    for report in reports:
        merged["files"] |= report["files"]
        for name, entry in report["tensors"].items():
            merged["tensors"].setdefault(name, {**entry, "parts": []})["parts"] += entry["parts"]
    return merged


def _cut(slice_: TensorSlice) -> Iterable[tuple[int, Tensor]]:
    """Ranges of rows that fill one file each, with the row that each starts at."""
    values = slice_.values
    if values.numel() == 0:
        return
    if values.numel() * values.element_size() <= _FILE_BYTES or values.dim() == 0:
        yield slice_.row, values
        return
    rows = max(1, _FILE_BYTES * len(values) // (values.numel() * values.element_size()))
    for start in range(0, len(values), rows):
        yield slice_.row + start, values[start : start + rows]


def _write(folder: Folder, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with folder.create(name) as file:
        for content in _encode(tensors):
            digest.update(content)
            file.write(content)
            size += len(content)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _encode(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file with these CPU tensors, in chunks that are not copies.

    The library reads these files, but does not write them: its `save` copies the file while it holds the interpreter
    lock, which stops training for 0.1 s per 64 MiB, and its `save_file` knows local disks only.
    """
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start aligned
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        if tensor.numel():
            content = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(content), _CHUNK_BYTES):
                yield content[start : start + _CHUNK_BYTES]
