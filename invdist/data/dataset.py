"""A prepared data set: opened and checked, from a local folder or any pyarrow filesystem."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from invdist.data.schema import MANIFEST, SCHEMAS, SPLITS, VERSION
from invdist.data.verify import verify_manifest, verify_shards
from invdist.runtime.errors import UserError
from invdist.runtime.files import Folder

__all__ = ["SPLITS", "Dataset"]


class Dataset:
    """A prepared data set. Make one with `Dataset.open`.

    `users`, `items`: how many of each. `rows`: rows per split. `summary`: the columns of the paper's data table.
    `fingerprint`: equal for equal content. `manifest`: all of `dataset.json`.
    """

    def __init__(self, path: str, filesystem: pafs.FileSystem, root: str, manifest: dict[str, Any]) -> None:
        self.path = path
        self.filesystem = filesystem
        self.root = root
        self.manifest = manifest
        self.users: int = manifest["users"]
        self.items: int = manifest["items"]
        self.rows: dict[str, int] = manifest["rows"]
        self.summary: dict[str, Any] = manifest["summary"]
        self.fingerprint: str = manifest["fingerprint"]

    @classmethod
    def open(
        cls,
        path: str,
        verify: Literal["full", "fast"] = "full",
        filesystem: pafs.FileSystem | None = None,
    ) -> Dataset:
        """Opens the data set at `path`, a local folder, a URI, or a path inside `filesystem`.

        `full` reads every shard and checks columns, types, ranges and checksums; `fast` checks the manifest and that
        every file is there with its size. Raises `UserError` naming the file, and the row, that is wrong.
        """
        path = str(path)
        folder = Folder.at(path) if filesystem is None else Folder(filesystem, path)
        filesystem, root = folder.filesystem, folder.path
        manifest = _read_manifest(filesystem, root, path)
        verify_manifest(manifest, f"{path}/{MANIFEST}")
        verify_shards(filesystem, root, path, manifest, full=verify == "full")
        return cls(path, filesystem, root, manifest)

    def shards(self, split: str) -> list[dict[str, Any]]:
        """The manifest's entries (`file`, `rows`, `bytes`, `sha256`) of a split's shards, in order."""
        return self.manifest["shards"][split]

    def parquet(self, file: str) -> pq.ParquetFile:
        """An open parquet file of the data set; `file` as in the manifest."""
        return pq.ParquetFile(self.filesystem.open_input_file(f"{self.root}/{file}"))

    def scan(
        self, split: str, columns: Sequence[str] | None = None, batch_rows: int = 65_536, shard: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a split (or of `truth`) in shard order, or those of one shard, at most `batch_rows` at a time."""
        for entry in self.shards(split) if shard is None else [self.shards(split)[shard]]:
            with self.parquet(entry["file"]) as file:
                yield from file.iter_batches(batch_rows, columns=list(columns) if columns else None)

    def row_groups(self, splits: Sequence[str]) -> list[tuple[str, int]]:
        """(file, number) of every row group of these splits, in shard order: what several readers divide."""
        rows = self.manifest["row_group_rows"]
        shards = [shard for split in splits for shard in self.shards(split)]
        return [(shard["file"], number) for shard in shards for number in range(-(-shard["rows"] // rows))]

    def read_groups(self, groups: Sequence[tuple[str, int]], columns: Sequence[str]) -> list[np.ndarray]:
        """The given columns of some row groups, in their order."""
        by_file: dict[str, list[int]] = {}
        for name, number in groups:
            by_file.setdefault(name, []).append(number)
        tables = []
        for name, numbers in by_file.items():
            with self.parquet(name) as file:
                tables.append(file.read_row_groups(numbers, columns=list(columns)))
        whole = pa.concat_tables(tables) if tables else None
        return [np.empty(0, np.int32) if whole is None else whole[column].to_numpy() for column in columns]

    def read(self, split: str, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows of a split (or of `truth`) in shard order, in memory."""
        tables = []
        for shard in self.shards(split):
            with self.parquet(shard["file"]) as file:
                tables.append(file.read(columns=list(columns) if columns else None))
        if not tables:
            empty = SCHEMAS[split].empty_table()
            return empty.select(list(columns)) if columns else empty
        return pa.concat_tables(tables)

    def raw_ids(self, entity: Literal["users", "items"]) -> pa.Array:
        """The raw ids of users or items, in the order of their indices."""
        pieces = list(self.scan_raw_ids(entity))
        return pa.concat_arrays(pieces) if pieces else pa.array([], self.raw_id_type(entity))

    def raw_id_type(self, entity: Literal["users", "items"]) -> pa.DataType:
        """int64 or string."""
        name = self.manifest["files"][entity]["file"]
        with self.parquet(name) as file:
            schema = file.schema_arrow
        if "raw" not in schema.names:
            raise UserError(f"{self.path}/{name}: column raw is missing")
        kind = schema.field("raw").type
        if kind not in (pa.int64(), pa.string()):
            raise UserError(f"{self.path}/{name}: raw ids are {kind}; expected whole numbers or text")
        return kind

    def scan_raw_ids(
        self, entity: Literal["users", "items"], first: int = 0, end: int | None = None, batch_rows: int = 65_536
    ) -> Iterator[pa.Array]:
        """The raw ids of indices `[first, end)` (None: all that follow), at most `batch_rows` at a time."""
        self.raw_id_type(entity)
        for raw in self.scan_id_table(entity, "raw", first, end, batch_rows):
            if raw.null_count:
                name = self.manifest["files"][entity]["file"]
                raise UserError(
                    f"{self.path}/{name}: raw ids are missing; expected whole numbers or text, none missing"
                )
            yield raw

    def scan_id_table(
        self,
        entity: Literal["users", "items"],
        column: str,
        first: int = 0,
        end: int | None = None,
        batch_rows: int = 65_536,
    ) -> Iterator[pa.Array]:
        """A column of the table of users or items, of indices `[first, end)`; nothing if it has no such column."""
        with self.parquet(self.manifest["files"][entity]["file"]) as file:
            if column not in file.schema_arrow.names:
                return
            at, groups = 0, []
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if at + rows > first and (end is None or at < end):
                    groups.append((group, at))
                at += rows
            at = groups[0][1] if groups else 0
            for batch in file.iter_batches(batch_rows, [group for group, _ in groups], columns=[column]):
                start, stop = max(first, at), at + len(batch) if end is None else min(end, at + len(batch))
                if start < stop:
                    yield batch.column(column).slice(start - at, stop - start)
                at += len(batch)

    def true_preference(self, user: np.ndarray, item: np.ndarray) -> np.ndarray:
        """The true preference (float32, 0 to 1) of any pairs of a synthetic data set."""
        if "latent_users" not in self.manifest["files"]:
            raise UserError(f"{self.path}: the true preference is known for synthetic data only")
        logit = np.zeros(len(user), np.float32)
        vectors = []
        for entity, index in (("users", user), ("items", item)):
            with self.parquet(self.manifest["files"][f"latent_{entity}"]["file"]) as file:
                table = file.read()
            logit += table["bias"].to_numpy()[index]
            factors = table["factors"].combine_chunks()
            vectors.append(factors.flatten().to_numpy().reshape(len(factors), -1)[index])
        logit += np.einsum("nd,nd->n", *vectors)
        return 1 / (1 + np.exp(-logit))


def _read_manifest(filesystem: pafs.FileSystem, root: str, path: str) -> dict[str, Any]:
    try:
        with filesystem.open_input_file(f"{root}/{MANIFEST}") as file:
            content = file.read()
    except FileNotFoundError:
        raise UserError(
            f"{path} is not a prepared data set: it has no {MANIFEST} (an interrupted prepare leaves none); "
            "make one with `invdist prepare`"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {path}/{MANIFEST}: {error}") from error
    try:
        manifest = json.loads(content)
    except ValueError as error:
        raise UserError(f"{path}/{MANIFEST} is not JSON: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != "invdist dataset":
        raise UserError(f"{path}/{MANIFEST} does not describe an invdist data set")
    if manifest.get("version") != VERSION:
        raise UserError(
            f"{path}/{MANIFEST}: version {manifest.get('version')!r}, but this invdist reads version {VERSION}; "
            "prepare the data again"
        )
    return manifest
