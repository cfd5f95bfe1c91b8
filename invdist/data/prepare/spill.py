"""Rows on disk between two passes: buckets of a random partition, each small enough to hold in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

BUCKETS = 128
"""With 36 bytes a row, a bucket of a billion rows has 280 MB; sorting it takes three times that."""

_CHUNK = 1 << 20


class Spill:
    """Append-only buckets of records of one structured `dtype`, kept in `folder` until `remove`."""

    def __init__(self, folder: Path, dtype: np.dtype) -> None:
        folder.mkdir()
        self.folder = folder
        self.dtype = dtype
        self._files = [open(self._path(bucket), "wb", buffering=1 << 16) for bucket in range(BUCKETS)]  # noqa: SIM115

    def append(self, records: np.ndarray, bucket: np.ndarray) -> None:
        """Adds each record to its bucket (uint8); records of a bucket keep their order."""
        order = np.argsort(bucket, kind="stable")
        grouped = records[order]
        ends = np.cumsum(np.bincount(bucket, minlength=BUCKETS))
        for number, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            if end > start:
                self._files[number].write(grouped[start:end].view(np.uint8).data)

    def close(self) -> None:
        """Ends writing; reading starts here."""
        for file in self._files:
            file.close()

    def buckets(self) -> Iterator[np.ndarray]:
        """The records of each bucket in turn."""
        for bucket in range(BUCKETS):
            yield np.fromfile(self._path(bucket), self.dtype)

    def chunks(self, field: str) -> Iterator[np.ndarray]:
        """One field of all records, in pieces of bounded size."""
        for bucket in range(BUCKETS):
            with open(self._path(bucket), "rb") as file:
                while len(piece := np.fromfile(file, self.dtype, _CHUNK)):
                    yield piece[field]

    def remove(self) -> None:
        """Deletes the files."""
        self.close()
        for bucket in range(BUCKETS):
            self._path(bucket).unlink(missing_ok=True)
        self.folder.rmdir()

    def _path(self, bucket: int) -> Path:
        return self.folder / f"{bucket:03d}"
