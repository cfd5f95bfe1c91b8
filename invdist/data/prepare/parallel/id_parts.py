"""Raw ids to dense indices, without all ids in one process.

Every chunk of the log has its distinct ids sorted in a file. Splitters, chosen among samples of these, cut the ids into
parts by range. A part has the ids of its range from all chunks: it finds the distinct ones, their ranks and their
random words. The final index is the rank within the part plus the ids in all parts before it: the rank of the raw id
among all, as in `ids.IdMap`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from invdist.data import hashing
from invdist.data.prepare.parallel.arrays import read_range, write_arrays
from invdist.runtime.files import Folder

FENCE = 4096
"""Ids of a chunk between two samples; files of sorted ids have batches of so many."""
_ENTRY = np.dtype([("rank", np.int32), ("word", np.uint64)])


def sorted_ids(column: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """(the distinct ids, sorted; the place (int32) of every row's id among them)."""
    encoded = column.dictionary_encode()
    order = pc.call_function("sort_indices", [encoded.dictionary])
    place = np.empty(len(order), np.int32)
    place[order.to_numpy()] = np.arange(len(order), dtype=np.int32)
    return encoded.dictionary.take(order), place[encoded.indices.to_numpy(zero_copy_only=False)]


def write_ids(folder: Folder, name: str, ids: pa.Array) -> list[Any]:
    """Writes sorted ids; gives every `FENCE`-th, the first included."""
    table = pa.record_batch([ids], ["raw"])
    with folder.create(name, flush=False) as file, pa.ipc.new_file(file, table.schema) as writer:
        for start in range(0, len(ids), FENCE):
            writer.write_batch(table.slice(start, FENCE))
    return ids.take(pa.array(np.arange(0, len(ids), FENCE))).to_pylist()


def read_ids(folder: Folder, name: str, low: Any = None, high: Any = None, fences: Sequence[Any] = ()) -> pa.Array:
    """The ids of a file in [low, high), None for no bound; `fences` are what `write_ids` gave."""
    with folder.open(name) as file, pa.ipc.open_file(file) as reader:
        first = 0 if low is None else max(bisect_right(fences, low) - 1, 0)
        last = reader.num_record_batches if high is None else bisect_left(fences, high)
        batches = [reader.get_batch(number)["raw"] for number in range(first, last)]
        kind = reader.schema.field("raw").type
    ids = pa.concat_arrays(batches) if batches else pa.array([], kind)
    for bound, compare in ((low, "greater_equal"), (high, "less")):
        if bound is not None:
            ids = ids.filter(pc.call_function(compare, [ids, pa.scalar(bound, kind)]))
    return ids


def splitters(fences: Sequence[Sequence[Any]], ids: int, part_ids: int) -> list[Any]:
    """Where parts begin (without the first), so that each has about `part_ids` of the `ids` ids of all chunks."""
    pool = sorted(fence for chunk in fences for fence in chunk)
    parts = max(1, -(-ids // part_ids))
    return sorted({pool[len(pool) * part // parts] for part in range(1, parts)} - {pool[0]}) if pool else []


def ranges(cuts: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The bounds [low, high) of each part."""
    return list(pairwise([None, *cuts, None]))


def number_part(
    source: Folder,
    names: Sequence[str],
    fences: Sequence[Sequence[Any]],
    low: Any,
    high: Any,
    target: Folder,
    name: str,
) -> dict[str, Any]:
    """Writes a part: its distinct ids as `NAME.ids`, and as `NAME.entries` (rank, word) of each chunk's ids in turn.

    Gives how many ids are `distinct`, and of how many ids of each chunk there are `entries`.
    """
    pieces = [read_ids(source, chunk, low, high, fence) for chunk, fence in zip(names, fences, strict=True)]
    distinct, place = sorted_ids(pa.concat_arrays(pieces))
    words = np.array([hashing.key(value) for value in distinct.to_pylist()], np.uint64)
    entries = np.empty(len(place), _ENTRY)
    entries["rank"], entries["word"] = place, words[place]
    write_ids(target, f"{name}.ids", distinct)
    write_arrays(target, f"{name}.entries", [entries])
    return {"distinct": len(distinct), "entries": [len(piece) for piece in pieces]}


class NumberedIds:
    """The numbered ids of an entity (`users` or `items`): parts on disk, known by their bounds and sizes."""

    def __init__(self, entity: str, cuts: Sequence[Any], parts: Sequence[dict[str, Any]], folder: Folder) -> None:
        self.entity, self.cuts, self.folder = entity, list(cuts), folder
        self.first = np.concatenate([[0], np.cumsum([part["distinct"] for part in parts], dtype=np.int64)])
        """The first index of each part, and the number of all ids."""
        # By chunk and part: where the entries of a chunk begin in each part's file.
        self._at = np.array([np.concatenate([[0], np.cumsum(part["entries"])]) for part in parts], np.int64)

    def __len__(self) -> int:
        return int(self.first[-1])

    def of_chunk(self, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        """(final indices as int32, words as uint64) of the sorted distinct ids of a chunk."""
        entries, index = [], []
        for part, (start, stop) in enumerate(self._at[:, chunk : chunk + 2].tolist()):
            if start < stop:
                found = read_range(self.folder, f"{self.entity}-{part:05d}.entries", _ENTRY, start, stop)
                entries.append(found["word"])
                index.append(found["rank"] + np.int32(self.first[part]))
        if not entries:
            return np.empty(0, np.int32), np.empty(0, np.uint64)
        return np.concatenate(index), np.concatenate(entries)

    def part(self, number: int) -> pa.Array:
        """The raw ids of a part, in the order of their indices."""
        return read_ids(self.folder, f"{self.entity}-{number:05d}.ids")

    def find(self, number: int, values: pa.Array) -> np.ndarray:
        """Final indices (int64) of ids among those of one part, -1 where it has none."""
        found = pc.call_function("index_in", [values], pc.SetLookupOptions(self.part(number)))
        rank = pc.fill_null(found, -1).to_numpy().astype(np.int64)
        return np.where(rank < 0, -1, rank + self.first[number])
