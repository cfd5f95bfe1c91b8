"""Rows in files of the unfinished work, cut into shards, and the shards written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from invdist.data.prepare.parallel.arrays import read_columns
from invdist.data.prepare.writer import encode, shard_tables
from invdist.runtime.files import Folder

Run = tuple[str, int, int, int, bool]
"""Rows that follow each other: (file, rows in it, start, stop, whether their labels are hidden)."""


def cut(runs: Sequence[Run], rows: int) -> list[list[Run]]:
    """Runs of rows, cut into shards of `rows` rows; the last one may have fewer."""
    shards: list[list[Run]] = []
    room = 0
    for file, size, start, stop, hidden in runs:
        while start < stop:
            if not room:
                shards.append([])
                room = rows
            upto = min(stop, start + room)
            shards[-1].append((file, size, start, upto, hidden))
            room -= upto - start
            start = upto
    return shards


def read_runs(
    folder: Folder, dtype: np.dtype, runs: Sequence[Run], names: Sequence[str]
) -> Iterator[tuple[Run, dict[str, np.ndarray]]]:
    """Each run with its columns, from files that have the fields of `dtype` column by column; one read for a file."""
    for (file, rows), some in groupby(runs, lambda run: run[:2]):
        some = list(some)
        first, last = min(run[2] for run in some), max(run[3] for run in some)
        found = read_columns(folder, file, dtype, rows, first, last, names)
        for run in some:
            yield run, {name: column[run[2] - first : run[3] - first] for name, column in found.items()}


def write_shard(target: Folder, split: str, number: int, columns: dict[str, np.ndarray]) -> dict[str, Any]:
    """Writes one shard of a split; gives its entries in the manifest by folder, its rows and positive labels."""
    entries = {}
    for name, path, table in shard_tables(split, number, columns):
        content, entries[name] = encode(path, table)
        with target.child(name).create(path.rsplit("/", 1)[1], flush=False) as file:
            file.write(content)
    positives = int(np.count_nonzero(columns["label"] == 1)) if "label" in columns else 0
    return {"rows": len(columns["user"]), "entries": entries, "positives": positives}
