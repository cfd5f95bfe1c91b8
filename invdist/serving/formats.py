"""Tables written batch by batch as parquet, CSV or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol, get_args

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

Format = Literal["parquet", "csv", "jsonl"]
FORMATS: tuple[str, ...] = get_args(Format)


class TableWriter(Protocol):
    """Takes the tables of one file in turn."""

    def write_table(self, table: pa.Table) -> None:
        """Adds rows."""
        ...


@contextmanager
def table_writer(file: Any, schema: pa.Schema, kind: str) -> Iterator[TableWriter]:
    """A writer of tables with this schema into an open file; the file is complete when the block ends."""
    if kind == "parquet":
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            yield writer
    elif kind == "csv":
        with pacsv.CSVWriter(file, schema) as writer:
            yield writer
    else:
        yield _JsonLines(file)


class _JsonLines:
    def __init__(self, file: Any) -> None:
        self._file = file

    def write_table(self, table: pa.Table) -> None:
        lines = (json.dumps(row, ensure_ascii=False) for row in table.to_pylist())
        self._file.write("".join(f"{line}\n" for line in lines).encode())
