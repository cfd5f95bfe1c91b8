"""Copies slices of tensors, so that training can go on, and writes them as safetensors files of bounded size."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from invdist.runtime.files import Folder
from invdist.training.checkpoint.manifest import DTYPE_NAMES
from invdist.training.checkpoint.state import TensorSlice

_FILE_BYTES = 64 << 20
_SMALL_BYTES = 1 << 20
_CHUNK_BYTES = 8 << 20
_STAGE_BYTES = 32 << 20


class Staging:
    """Copies a device tensor to ordinary host memory through two pinned buffers of `size` bytes, chunk by chunk.

    Pinned memory is the fast way off a GPU, but cannot be swapped: a second copy of all tables in it could take the
    host down. While one chunk is on its way, the one before is moved on.
    """

    def __init__(self, size: int = _STAGE_BYTES, pin: bool = True) -> None:
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
        self._pinned = pin

    def copy(self, target: Tensor, source: Tensor) -> None:
        """`target.copy_(source)`, for tensors of the same shape and type; complete on return."""
        if source.dim() == 0:
            target.copy_(source)
            return
        rows = max(1, len(self._buffers[0]) // max(1, source[:1].nbytes))
        waiting: tuple[Tensor, Tensor, Any] | None = None
        for number, start in enumerate(range(0, len(source), rows)):
            chunk = source[start : start + rows]
            if chunk.nbytes > len(self._buffers[0]):  # one row is more than a buffer
                target[start : start + rows].copy_(chunk)
                continue
            buffer = self._buffers[number % 2][: chunk.nbytes].view(chunk.dtype).view(chunk.shape)
            buffer.copy_(chunk, non_blocking=True)
            event = torch.cuda.Event() if self._pinned else None
            if event is not None:
                event.record()
            self._move_on(waiting)
            waiting = (target[start : start + rows], buffer, event)
        self._move_on(waiting)

    @staticmethod
    def _move_on(waiting: tuple[Tensor, Tensor, Any] | None) -> None:
        if waiting is not None:
            target, buffer, event = waiting
            if event is not None:
                event.synchronize()
            target.copy_(buffer)


class Snapshot:
    """Copies in main memory. Their memory is reused from save to save: the first use of new memory is slow."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._staging: Staging | None = None

    def take(self, slices: Iterable[TensorSlice]) -> list[TensorSlice]:
        """The same slices, over copies of their values."""
        taken, buffers = [], {}
        for slice_ in slices:
            if slice_.index is not None and not slice_.values.is_cuda:
                taken.append(slice_)  # changed rows are a copy already, if one on the device
                continue
            key = f"{slice_.name}@{slice_.row},{slice_.column}" if slice_.index is None else f"changed {len(taken)}"
            copy = self._buffers.get(key)
            if copy is None or copy.shape != slice_.values.shape or copy.dtype != slice_.values.dtype:
                copy = torch.empty(slice_.values.shape, dtype=slice_.values.dtype)
            self._copy(copy, slice_.values.detach())
            buffers[key] = copy
            index = None if slice_.index is None else slice_.index.cpu()
            taken.append(dataclasses.replace(slice_, values=copy, index=index))
        self._buffers = buffers
        return taken

    def _copy(self, target: Tensor, source: Tensor) -> None:
        if not source.is_cuda:
            target.copy_(source)
            return
        self._staging = self._staging or Staging()
        self._staging.copy(target, source)


def write_slices(folder: Folder, rank: int, slices: Iterable[TensorSlice], threads: int = 1) -> dict[str, Any]:
    """Writes the slices of one rank; returns their `tensors` and `files` for the manifest, as plain data.

    A large slice becomes files of its own, cut by rows; the small ones of a rank share a file. Files are hashed and
    written by `threads` threads.
    """
    tensors: dict[str, dict[str, Any]] = {}
    files: dict[str, dict[str, Any]] = {}
    small: dict[str, Tensor] = {}
    shared = f"rank-{rank}.safetensors"
    writing: deque[tuple[str, Future[dict[str, Any]]]] = deque()

    def collect(most: int) -> None:
        while len(writing) > most:
            name, future = writing.popleft()
            files[name] = future.result()

    with ThreadPoolExecutor(threads) as pool:
        for name, content in _files_of(slices, rank, tensors, small):
            writing.append((name, pool.submit(_write, folder, name, content)))
            collect(2 * threads)
        collect(0)
    files[shared] = _write(folder, shared, small)
    return {"tensors": tensors, "files": files}


def _files_of(
    slices: Iterable[TensorSlice], rank: int, tensors: dict[str, dict[str, Any]], small: dict[str, Tensor]
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The large files of a rank: name and tensors. What is for the shared one goes to `small`, entries to `tensors`."""
    shared = f"rank-{rank}.safetensors"
    for slice_ in slices:
        entry = {"dtype": DTYPE_NAMES[slice_.values.dtype], "shape": list(slice_.shape), "parts": []}
        if slice_.index is not None:
            entry["changed"] = []
        if slice_.multiplier != 1:
            entry["multiplier"] = slice_.multiplier
        entry = tensors.setdefault(slice_.name, entry)
        for row, values in _cut(slice_):
            rows = len(values) if values.dim() else 1
            columns = values.numel() // rows
            key = slice_.name
            if slice_.index is not None:
                row = int(slice_.index[0])  # no other slice of this tensor and column begins with it
            if rows * columns < math.prod(slice_.shape) or slice_.index is not None:
                key += f"[{row}:{row + rows},{slice_.column}:{slice_.column + columns}]"
            content = {key: values.cpu()}
            if slice_.index is not None:
                content[f"{key} rows"] = slice_.index.cpu()
            if values.nbytes < _SMALL_BYTES:
                name = shared
                small |= content
            else:
                name = re.sub(r"[^A-Za-z0-9]+", "-", key).strip("-") + ".safetensors"
                yield name, content
            part = dict(file=name, key=key, rows=rows, column=slice_.column, columns=columns)  # noqa: C408
            if slice_.index is None:
                entry["parts"].append({**part, "row": row})
            else:
                entry["changed"].append({**part, "index": f"{key} rows"})


def merge(reports: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The `tensors` and `files` of all ranks."""
    merged: dict[str, Any] = {"tensors": {}, "files": {}}
    for report in reports:
        merged["files"] |= report["files"]
        for name, entry in report["tensors"].items():
            shared = {key: entry[key] for key in ("dtype", "shape", "multiplier") if key in entry}
            whole = merged["tensors"].setdefault(name, {**shared, "parts": []})
            whole["parts"] += entry["parts"]
            if "changed" in entry:
                whole["changed"] = whole.get("changed", []) + entry["changed"]
    return merged


def _cut(slice_: TensorSlice) -> Iterable[tuple[int, Tensor]]:
    """Ranges of rows that fill one file each, with the row that each starts at."""
    values = slice_.values
    if values.numel() == 0:
        return
    if values.nbytes <= _FILE_BYTES or values.dim() == 0 or slice_.index is not None:
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
