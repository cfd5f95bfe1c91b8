"""`users.parquet` and `items.parquet` written piece by piece, with the bytes of a table that is written whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from invdist.data.prepare.writer import PARQUET
from invdist.data.schema import ROW_GROUP_ROWS
from invdist.runtime.files import Folder


def write_id_table(target: Folder, entity: str, pieces: Iterable[pa.Table]) -> dict[str, Any]:
    """Writes at least one piece, in the order of indices, with a column `index`; gives the entry in the manifest."""
    path, written = f"{entity}.parquet", 0
    pieces = iter(pieces)
    pending, following = next(pieces), next(pieces, None)
    schema = pa.schema([("index", pa.int64()), *pending.schema])
    with target.create(path) as file:
        sink = _Hashed(file)
        with pq.ParquetWriter(pa.PythonFile(sink, mode="w"), schema, **PARQUET) as writer:
            while True:
                whole = len(pending) if following is None else len(pending) // ROW_GROUP_ROWS * ROW_GROUP_ROWS
                index = pa.array(np.arange(written, written + whole), pa.int64())
                if whole:
                    columns = [column.combine_chunks() for column in pending[:whole].columns]
                    writer.write_table(pa.table([index, *columns], schema=schema), ROW_GROUP_ROWS)
                written += whole
                if following is None:
                    break
                pending, following = pa.concat_tables([pending[whole:], following]), next(pieces, None)
    return {"file": path, "rows": written, "bytes": sink.size, "sha256": sink.digest.hexdigest()}


class _Hashed:
    """A file to write, which counts and hashes what is written."""

    closed = False

    def __init__(self, file: pa.NativeFile) -> None:
        self._file, self.size, self.digest = file, 0, hashlib.sha256()

    def write(self, content: bytes) -> int:
        """Writes on."""
        self._file.write(content)
        self.digest.update(content)
        self.size += len(content)
        return len(content)

    def flush(self) -> None:
        """The file below is flushed when it is closed."""

    def close(self) -> None:
        """The file below is closed by its owner."""
