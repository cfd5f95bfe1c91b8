"""Checks of a prepared data set. Every error names the file, and the row, that is wrong."""

from __future__ import annotations

import hashlib
import os
import re
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from invdist.data.schema import SCHEMAS, SPLITS, TRAINING_LABELED, fingerprint
from invdist.runtime.errors import UserError

_PLAIN_NAME = re.compile(r"([a-z_]+/)?[A-Za-z0-9_-][A-Za-z0-9_.-]*\.parquet")
_COUNTS = ("users", "items", "row_group_rows")


def verify_manifest(manifest: dict[str, Any], where: str) -> None:
    """Checks that the manifest is complete and agrees with itself."""
    for name in _COUNTS:
        if not (isinstance(manifest.get(name), int) and manifest[name] > 0):
            raise UserError(f"{where}: {name} is {manifest.get(name)!r}; expected a number above 0")
    for name in ("rows", "shards", "files", "summary", "counts", "labeling", "cut", "classes"):
        if not isinstance(manifest.get(name), dict):
            raise UserError(f"{where}: {name} is missing")
    for folder in (*SPLITS, "truth"):
        shards = manifest["shards"].get(folder)
        if not isinstance(shards, list) or not all(_whole_entry(entry) for entry in shards):
            raise UserError(f"{where}: shards.{folder}: expected a list of file, rows, bytes and sha256")
        rows = sum(entry["rows"] for entry in shards)
        expected = manifest["rows"].get("unclear" if folder == "truth" else folder)
        if rows != expected:
            raise UserError(f"{where}: the shards of {folder} hold {rows} rows, but rows.{folder} says {expected}")
        if folder != "truth":  # where nothing is known, truth shards of equal size are equal
            _check_no_copies(shards, where)
    for split in TRAINING_LABELED:
        found = manifest["classes"].get(split)
        if not isinstance(found, dict) or not all(isinstance(found.get(k), int) for k in ("positives", "negatives")):
            raise UserError(f"{where}: classes.{split}: expected positives and negatives")
    unclear, truth = manifest["shards"]["unclear"], manifest["shards"]["truth"]
    if [entry["rows"] for entry in unclear] != [entry["rows"] for entry in truth]:
        raise UserError(f"{where}: shards of truth are not aligned with those of unclear")
    for name, entry in manifest["files"].items():
        if not _whole_entry(entry):
            raise UserError(f"{where}: files.{name}: expected file, rows, bytes and sha256")
    for name in ("users", "items"):
        if name not in manifest["files"]:
            raise UserError(f"{where}: files.{name} is missing")
    for folder, entries in (*manifest["shards"].items(), ("", manifest["files"].values())):
        for entry in entries:
            _check_stays_inside(entry["file"], folder, where)
    if manifest.get("fingerprint") != fingerprint(manifest):
        raise UserError(f"{where} was changed after it was written: its fingerprint does not fit its shards")
    for name in ("users", "items"):
        if manifest["files"][name]["rows"] != manifest[name]:
            raise UserError(f"{where}: {manifest[name]} {name}, but files.{name} has {manifest['files'][name]['rows']}")


def _whole_entry(entry: Any) -> bool:
    kinds = {"file": str, "rows": int, "bytes": int, "sha256": str}
    return isinstance(entry, dict) and all(isinstance(entry.get(name), kind) for name, kind in kinds.items())


def _check_stays_inside(file: str, folder: str, where: str) -> None:
    """A manifest is untrusted: it may only name files in the data set's own folders."""
    if not _PLAIN_NAME.fullmatch(file) or (folder and not file.startswith(f"{folder}/")):
        raise UserError(f"{where}: {file!r} is not the name of a parquet file in {folder or 'the data set'}")


def _check_no_copies(shards: list[dict[str, Any]], where: str) -> None:
    seen: dict[str, str] = {}
    for entry in shards:
        for mark in (entry["file"], entry["sha256"]):
            if mark in seen:
                raise UserError(f"{where}: {entry['file']} is a copy of {seen[mark]}; its rows would count twice")
            seen[mark] = entry["file"]


def verify_shards(filesystem: pafs.FileSystem, root: str, path: str, manifest: dict[str, Any], *, full: bool) -> None:
    """Checks every file that the manifest names (size, or with `full` all of it), and that there is no other shard."""
    limits = {"user": manifest["users"], "item": manifest["items"], "label": 2}
    for folder in (*SPLITS, "truth"):
        entries = manifest["shards"][folder]
        _check_unexpected_files(filesystem, f"{root}/{folder}", f"{path}/{folder}", {e["file"] for e in entries})
        for entry in entries:
            _check_file(filesystem, root, path, entry, SCHEMAS[folder], limits, manifest["row_group_rows"], full)
    for entry in manifest["files"].values():
        _check_file(filesystem, root, path, entry, None, {}, None, full)


def _check_unexpected_files(filesystem: pafs.FileSystem, root: str, path: str, known: set[str]) -> None:
    folder = path.rsplit("/", 1)[-1]
    for info in filesystem.get_file_info(pafs.FileSelector(root, allow_not_found=True)):
        if info.base_name.endswith(".parquet") and f"{folder}/{info.base_name}" not in known:
            raise UserError(
                f"{path}/{info.base_name} is not in the manifest; remove it if it is a copy or from elsewhere"
            )


def _check_file(
    filesystem: pafs.FileSystem,
    root: str,
    path: str,
    entry: dict[str, Any],
    schema: pa.Schema | None,
    limits: dict[str, int],
    row_group_rows: int | None,
    full: bool,
) -> None:
    target, where = f"{root}/{entry['file']}", f"{path}/{entry['file']}"
    info = filesystem.get_file_info(target)
    if info.type != pafs.FileType.File:
        raise UserError(f"{where} is missing; the manifest names it")
    if isinstance(filesystem, pafs.LocalFileSystem) and os.path.islink(target):
        raise UserError(f"{where} is a link; expected a file")
    if full or info.size != entry["bytes"]:
        with filesystem.open_input_file(target) as file:
            content = file.read_buffer()
        # Content first: a message about a row says more than one about a checksum.
        _check_content(content, where, entry, schema, limits, row_group_rows)
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise UserError(f"{where}: its checksum is not the manifest's; the file was changed after it was written")


def _check_content(
    content: pa.Buffer,
    where: str,
    entry: dict[str, Any],
    schema: pa.Schema | None,
    limits: dict[str, int],
    row_group_rows: int | None,
) -> None:
    try:
        file = pq.ParquetFile(pa.BufferReader(content))
        if schema is not None:
            _check_columns(file.schema_arrow, schema, where)
        rows = file.metadata.num_rows
        if rows != entry["rows"]:
            raise UserError(f"{where}: {rows} rows, but the manifest says {entry['rows']}")
        table = file.read()
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{where} is not a whole parquet file ({content.size} bytes, the manifest says {entry['bytes']}): {error}"
        ) from error
    if schema is None:
        return
    groups = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
    if row_group_rows and any(rows != row_group_rows for rows in groups[:-1]):
        raise UserError(f"{where}: row groups of {groups[:3]}... rows; expected {row_group_rows} in each but the last")
    for name in schema.names:
        if table[name].null_count:
            raise UserError(f"{where}: {table[name].null_count} rows have no {name}")
        values = table[name].to_numpy()
        if name == "truth":
            wrong = np.flatnonzero((values < 0) | (values > 1))
            most = "1, or NaN for unknown"
        else:
            wrong = np.flatnonzero((values < 0) | (values >= limits[name]))
            most = str(limits[name] - 1)
        if len(wrong):
            row = int(wrong[0])
            raise UserError(f"{where}: row {row}: {name} is {values[row]}; expected 0 to {most}")


def _check_columns(found: pa.Schema, expected: pa.Schema, where: str) -> None:
    for field in expected:
        if field.name not in found.names:
            raise UserError(f"{where}: column {field.name} is missing; it has {', '.join(found.names) or 'none'}")
        kind = found.field(field.name).type
        if kind != field.type:
            raise UserError(f"{where}: column {field.name} is {kind}; expected {field.type}")
