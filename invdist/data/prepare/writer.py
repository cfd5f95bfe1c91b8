"""Writes a prepared data set: shards first, the manifest last. The folder gets its name when it is complete."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from invdist.data.schema import (
    DAY,
    MANIFEST,
    REPLAYED,
    ROW_GROUP_ROWS,
    SCHEMAS,
    SET_ASIDE,
    SPLITS,
    TRAINING_LABELED,
    VERSION,
    fingerprint,
)
from invdist.runtime.errors import UserError
from invdist.runtime.files import Folder, describe_os_error, new_folder


class DatasetWriter:
    """Collects interactions per split and writes them as shards of `shard_rows` rows into `folder`."""

    def __init__(self, folder: Path, shard_rows: int) -> None:
        self.folder = folder
        self.shard_rows = shard_rows
        self.shards: dict[str, list[dict[str, Any]]] = {name: [] for name in (*SPLITS, "truth")}
        self.files: dict[str, dict[str, Any]] = {}
        self.rows = dict.fromkeys(SPLITS, 0)
        self._pending: dict[str, list[dict[str, np.ndarray]]] = {split: [] for split in SPLITS}
        self._pending_rows = dict.fromkeys(SPLITS, 0)

    def add(self, split: str, columns: dict[str, np.ndarray]) -> None:
        """Appends rows to a split: `user`, `item`, `label` (or `truth` for unclear), and `day` if all rows have one."""
        rows = len(columns["user"])
        self.rows[split] += rows
        self._pending[split].append(columns)
        self._pending_rows[split] += rows
        if self._pending_rows[split] >= self.shard_rows:
            self._flush(split, whole_shards_only=True)

    def add_table(self, name: str, path: str, table: pa.Table) -> None:
        """Writes one table beside the shards (id mappings, latent truth), listed in the manifest as `name`."""
        self.files[name] = self._write(path, table)

    def finish(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Writes what is pending and then the manifest, which is returned as written."""
        for split in SPLITS:
            self._flush(split, whole_shards_only=False)
        manifest = complete(manifest, self.rows, self.files, self.shards)
        with open(self.folder / MANIFEST, "w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        return manifest

    def _flush(self, split: str, *, whole_shards_only: bool) -> None:
        pending = self._pending[split]
        if not pending:
            return
        columns = {name: np.concatenate([part[name] for part in pending]) for name in pending[0]}
        total, start = len(columns["user"]), 0
        while total - start >= self.shard_rows or (start < total and not whole_shards_only):
            stop = min(start + self.shard_rows, total)
            self._write_shard(split, {name: column[start:stop] for name, column in columns.items()})
            start = stop
        self._pending[split] = [{name: column[start:].copy() for name, column in columns.items()}]
        self._pending_rows[split] = total - start

    def _write_shard(self, split: str, columns: dict[str, np.ndarray]) -> None:
        for name, path, table in shard_tables(split, len(self.shards[split]), columns):
            self.shards[name].append(self._write(path, table))

    def _write(self, path: str, table: pa.Table) -> dict[str, Any]:
        content, entry = encode(path, table)
        target = self.folder / path
        target.parent.mkdir(exist_ok=True)
        with open(target, "wb") as file:
            file.write(content)
        return entry


def shard_tables(split: str, number: int, columns: dict[str, np.ndarray]) -> Iterator[tuple[str, str, pa.Table]]:
    """A shard of a split: (folder, file, table), twice for `unclear`, whose truth is beside it."""
    for name in (split, "truth") if split == "unclear" else (split,):
        schema = SCHEMAS[name]
        if "day" in columns and name != "truth":
            schema = schema.append(DAY)
            if name == "unclear":
                schema = schema.append(SET_ASIDE)
            elif name in TRAINING_LABELED:
                schema = schema.append(REPLAYED)
        arrays = [pa.array(columns[field.name], field.type) for field in schema]
        yield name, f"{name}/part-{number:05d}.parquet", pa.Table.from_arrays(arrays, schema=schema)


# Ids in random order have no repetition that a dictionary could use; plain pages are smaller and faster.
PARQUET: dict[str, Any] = {"compression": "zstd", "compression_level": 1, "use_dictionary": False}
"""How all files are written."""


def encode(path: str, table: pa.Table) -> tuple[pa.Buffer, dict[str, Any]]:
    """(the bytes of a parquet file, its entry in the manifest)."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=ROW_GROUP_ROWS, **PARQUET)
    content = sink.getvalue()
    digest = hashlib.sha256(content).hexdigest()
    return content, {"file": path, "rows": table.num_rows, "bytes": content.size, "sha256": digest}


def complete(
    manifest: dict[str, Any], rows: dict[str, int], files: dict[str, Any], shards: dict[str, Any]
) -> dict[str, Any]:
    """The whole manifest of what was written."""
    manifest = {
        "format": "invdist dataset",
        "version": VERSION,
        **manifest,
        "rows": rows,
        "row_group_rows": ROW_GROUP_ROWS,
        "files": files,
        "shards": shards,
    }
    return {**manifest, "fingerprint": fingerprint(manifest)}


@contextmanager
def new_dataset(output: str | Path, shard_rows: int) -> Iterator[DatasetWriter]:
    """A writer of the new data set `output`, which is there when the block ends without an error (see `new_folder`).

    `output` is a path or a URI. A data set for an object store is made in a temporary folder, and then copied.
    """
    target = Folder.at(output)
    with new_folder(target.path) if target.local else _copied(target, str(output)) as folder:
        try:
            yield DatasetWriter(folder, shard_rows)
        except OSError as error:
            raise UserError(_disk_message(error, Path(target.path), folder)) from error


@contextmanager
def _copied(target: Folder, output: str) -> Iterator[Path]:
    """A temporary folder, copied to an object store when the block ends without an error: the manifest last."""
    if target.files() or target.folders():
        raise UserError(f"{output} is already there; choose another --output or remove it first")
    with tempfile.TemporaryDirectory(prefix="invdist-prepare-") as name:
        folder = Path(name)
        yield folder
        manifest = (folder / MANIFEST).read_bytes()
        (folder / MANIFEST).unlink()
        try:
            pafs.copy_files(name, target.path, pafs.LocalFileSystem(), target.filesystem)
            with target.create(MANIFEST) as file:
                file.write(manifest)
        except BaseException as error:
            with suppress(OSError):
                target.remove()
            if isinstance(error, OSError):
                raise UserError(f"cannot write {output}: {describe_os_error(error)}") from error
            raise


def _disk_message(error: OSError, output: Path, folder: Path) -> str:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"cannot write {output}: {error}"
    prefix = folder.name.rsplit("-", 1)[0]
    left = [str(path) for path in sorted(output.parent.iterdir()) if path.name.startswith(prefix) and path != folder]
    return (
        f"no room to write {output}: {error.strerror}; what was written is removed again. Free space (about 40 bytes "
        "per log row) and prepare again"
        + (f"; killed calls have left {', '.join(left)}, which can be deleted" if left else "")
    )
