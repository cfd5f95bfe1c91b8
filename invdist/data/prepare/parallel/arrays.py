"""Arrays in files of any filesystem, of which any range can be read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from invdist.runtime.files import Folder


def write_arrays(folder: Folder, name: str, arrays: Sequence[np.ndarray]) -> None:
    """Writes arrays one after the other."""
    with folder.create(name, flush=False) as file:
        for array in arrays:
            file.write(np.ascontiguousarray(array).view(np.uint8).data)


def read_range(folder: Folder, name: str, dtype: np.dtype, start: int, stop: int, offset: int = 0) -> np.ndarray:
    """Entries [start, stop) of the array that begins at byte `offset` of a file."""
    size = np.dtype(dtype).itemsize
    with folder.open(name) as file:
        content = file.read_at((stop - start) * size, offset + start * size)
    assert len(content) == (stop - start) * size, f"{folder}/{name} is shorter than it was written"
    return np.frombuffer(content, dtype)


def read_columns(
    folder: Folder, name: str, dtype: np.dtype, rows: int, start: int, stop: int, columns: Sequence[str]
) -> dict[str, np.ndarray]:
    """Rows [start, stop) of some columns of a file that has the fields of `dtype`, of `rows` rows, column by column."""
    offset, found = 0, {}
    for field in dtype.names or ():
        if field in columns:
            found[field] = read_range(folder, name, dtype[field], start, stop, offset)
        offset += dtype[field].itemsize * rows
    return found


def bucketed(records: np.ndarray, bucket: np.ndarray, buckets: int) -> tuple[np.ndarray, list[int]]:
    """(records sorted by bucket, those of one in their order; where each bucket begins and the last one ends)."""
    order = np.argsort(bucket, kind="stable")
    edges = np.concatenate([[0], np.cumsum(np.bincount(bucket, minlength=buckets))])
    return records[order], edges.tolist()
