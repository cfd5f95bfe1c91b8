"""Writes a prepared data set: shards first, the manifest last. The folder gets its name when it is complete."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from invdist.data.schema import MANIFEST, ROW_GROUP_ROWS, SCHEMAS, SPLITS, VERSION, fingerprint
from invdist.runtime.errors import UserError


class DatasetWriter:
    """Collects rows per split and writes them as shards of `shard_rows` rows into `folder`."""

    def __init__(self, folder: Path, shard_rows: int) -> None:
        self.folder = folder
        self.shard_rows = shard_rows
        self.shards: dict[str, list[dict[str, Any]]] = {name: [] for name in (*SPLITS, "truth")}
        self.files: dict[str, dict[str, Any]] = {}
        self.rows = dict.fromkeys(SPLITS, 0)
        self._pending: dict[str, list[dict[str, np.ndarray]]] = {split: [] for split in SPLITS}
        self._pending_rows = dict.fromkeys(SPLITS, 0)

    def add(self, split: str, columns: dict[str, np.ndarray]) -> None:
        """Appends rows to a split: `user`, `item` and `label` (or `truth` for unclear), arrays of one length."""
        rows = len(columns["user"])
        self.rows[split] += rows
        self._pending[split].append(columns)
        self._pending_rows[split] += rows
        if self._pending_rows[split] >= self.shard_rows:
            self._flush(split, whole_shards_only=True)

    def add_table(self, name: str, path: str, table: pa.Table) -> None:
        """Writes one table beside the shards (id mappings, latent truth), noted in the manifest as `name`."""
        self.files[name] = self._write(path, table)

    def finish(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Writes what is pending and then the manifest; gives the manifest as written."""
        for split in SPLITS:
            self._flush(split, whole_shards_only=False)
        manifest = {
            "format": "invdist dataset",
            "version": VERSION,
            **manifest,
            "rows": self.rows,
            "row_group_rows": ROW_GROUP_ROWS,
            "files": self.files,
            "shards": self.shards,
        }
        manifest["fingerprint"] = fingerprint(manifest)
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
        part = f"part-{len(self.shards[split]):05d}.parquet"
        for name in (split, "truth") if split == "unclear" else (split,):
            schema = SCHEMAS[name]
            arrays = [pa.array(columns[field.name], field.type) for field in schema]
            table = pa.Table.from_arrays(arrays, schema=schema)
            self.shards[name].append(self._write(f"{name}/{part}", table))

    def _write(self, path: str, table: pa.Table) -> dict[str, Any]:
        sink = pa.BufferOutputStream()
        # Ids in random order have no repetition that a dictionary could use; plain pages are smaller and faster.
        pq.write_table(
            table,
            sink,
            row_group_size=ROW_GROUP_ROWS,
            compression="zstd",
            compression_level=1,
            use_dictionary=False,
        )
        content = sink.getvalue()
        target = self.folder / path
        target.parent.mkdir(exist_ok=True)
        with open(target, "wb") as file:
            file.write(content)
        return {
            "file": path,
            "rows": table.num_rows,
            "bytes": content.size,
            "sha256": hashlib.sha256(content).hexdigest(),
        }


@contextmanager
def new_dataset(output: Path, shard_rows: int) -> Iterator[DatasetWriter]:
    """A writer into a hidden sibling of `output`, which is renamed to `output` when the block ends without an error.

    After an error the unfinished folder is removed. A killed process leaves a folder `.<name>.partial-...` without a
    manifest, which cannot be opened as a data set.
    """
    if output.exists() or output.is_symlink():
        raise UserError(f"{output} is already there; choose another --output or remove it first")
    partial = output.parent / f".{output.name}.partial-{uuid.uuid4().hex[:8]}"
    try:
        partial.mkdir(parents=True)
        yield DatasetWriter(partial, shard_rows)
        try:
            os.rename(partial, output)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise UserError(f"{output} appeared while it was being prepared; nothing was overwritten") from error
            raise
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(_disk_message(error, output)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _disk_message(error: OSError, output: Path) -> str:
    """What went wrong, and which unfinished folders are left: of this call if it could not be removed, or of others."""
    left = sorted(output.parent.glob(f".{output.name}.partial-*"))
    removal = f"; unfinished folders that can be deleted: {', '.join(map(str, left))}" if left else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (
            f"no room to write {output}: {error.strerror}; what was written is removed; "
            f"free space (about 40 bytes per log row) and prepare again{removal}"
        )
    return f"cannot write {output}: {error}{removal}"
