"""The ids of a day and of the data set before it, joined in parts: what `onto.Joined` gives, with no process that has
all ids.

    sorting      chunks of both id tables -> their ids in order
    matching     ranges of ids -> which ids of the base were seen today, and which of today are new
    keeping      chunks of the base -> the new index of each id, counted from the first that its chunk keeps
    answering    ranges -> the new index of each id of today
    placing      chunks of today -> these by the day's own indices

A range has a piece of every sorted chunk. Files of a chunk are named after it, and so are those of a range, which have
something for each id of the base's chunks in turn (`seen`) or of today's (`links`, `answers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from invdist.data.dataset import Dataset
from invdist.data.prepare.onto import ENTITIES, GONE, Entity, day_of, last_seen_of, type_of_ids
from invdist.data.prepare.parallel.arrays import read_range, write_arrays
from invdist.data.prepare.parallel.id_parts import ranges, read_ids, sorted_ids, splitters, write_ids
from invdist.data.prepare.parallel.id_tables import write_id_table
from invdist.data.prepare.parallel.stages import Stages
from invdist.runtime.files import Folder

_INDEX, _FLAG = np.dtype(np.int32), np.dtype(bool)


@dataclass(frozen=True)
class _Chunk:
    """Indices [first, end) of the base or of the day."""

    name: str
    first: int
    end: int


def _chunks(name: str, count: int, size: int) -> list[_Chunk]:
    return [_Chunk(f"{name}-{at:010d}", at, min(at + size, count)) for at in range(0, count, size)]


class _Indices:
    """`onto.Indices` in the files of chunks, read when they are asked for."""

    def __init__(self, folder: Folder, chunks: Sequence[_Chunk], first: Sequence[int]) -> None:
        """`first` is added to the indices in the file of each chunk."""
        self._folder, self._chunks, self._first = folder, chunks, first

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        order = np.argsort(rows)
        ordered, found = rows[order], np.empty(len(rows), np.int32)
        ends = np.searchsorted(ordered, [chunk.end for chunk in self._chunks])
        for number, (start, stop) in enumerate(zip([0, *ends[:-1]], ends)):
            if start < stop:
                found[order[start:stop]] = self._of_chunk(number)[ordered[start:stop] - self._chunks[number].first]
        return found

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.concatenate([np.empty(0, _INDEX), *map(self._of_chunk, range(len(self._chunks)))])

    def _of_chunk(self, number: int) -> np.ndarray:
        chunk = self._chunks[number]
        return _shifted(_read(self._folder, chunk, "index", _INDEX), self._first[number])


def _read(folder: Folder, chunk: _Chunk, kind: str, dtype: np.dtype) -> np.ndarray:
    return read_range(folder, f"{chunk.name}.{kind}", dtype, 0, chunk.end - chunk.first)


def _shifted(index: np.ndarray, first: int) -> np.ndarray:
    return np.where(index == GONE, GONE, index + np.int32(first))


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What tasks know of users or items. `sizes_*`: how many ids of each chunk (column) are in each range (row)."""

    entity: Entity
    base: Dataset
    today: Dataset
    drop_unseen: int | None
    folder: Folder
    old: Sequence[_Chunk]
    new: Sequence[_Chunk]
    sizes_old: np.ndarray
    sizes_new: np.ndarray

    @property
    def day(self) -> int:
        return day_of(self.base) + 1

    def of_range(self, part: int, kind: str) -> str:
        """The name of a file of a range."""
        return f"{self.entity}-range-{part:05d}.{kind}"

    def collected(self, kind: str, dtype: np.dtype, sizes: np.ndarray, chunk: int) -> np.ndarray:
        """What the ranges have for the sorted ids of a chunk."""
        places = zip(sizes[:, :chunk].sum(axis=1).tolist(), sizes[:, : chunk + 1].sum(axis=1).tolist())
        parts = [read_range(self.folder, self.of_range(part, kind), dtype, *place) for part, place in enumerate(places)]
        return np.concatenate(parts)


class JoinedInParts:
    """`onto.NewIds` in files; `kept` are the ids that each chunk of the base keeps, `added` the new ones of ranges."""

    def __init__(self, job: _Job, kept: Sequence[int], added: Sequence[int]) -> None:
        self.job, self.new, self.dropped = job, sum(added), job.base.manifest[job.entity] - sum(kept)
        self.first_kept = [sum(kept[:chunk]) for chunk in range(len(kept))]
        self.first_added = [sum(kept) + sum(added[:part]) for part in range(len(added))]
        self.before = _Indices(job.folder, job.old, self.first_kept)
        self.today = _Indices(job.folder, job.new, [0] * len(job.new))

    def __len__(self) -> int:
        return self.job.base.manifest[self.job.entity] - self.dropped + self.new

    def pieces(self) -> Iterator[pa.Table]:
        """The id table without its column `index`, piece by piece."""
        job = self.job
        for chunk in job.old:
            raw = _raw_ids(job.base, job, chunk)
            kept = pa.array(_read(job.folder, chunk, "index", _INDEX) != GONE)
            seen = pa.array(_read(job.folder, chunk, "last_seen", _INDEX))
            yield pa.table({"raw": raw.filter(kept), "last_seen": seen.filter(kept)})
        for part in range(len(self.first_added)):
            raw = read_ids(job.folder, job.of_range(part, "ids"))
            yield pa.table({"raw": raw, "last_seen": np.full(len(raw), job.day, np.int32)})


def _raw_ids(dataset: Dataset, job: _Job, chunk: _Chunk) -> pa.Array:
    return pa.concat_arrays(list(dataset.scan_raw_ids(job.entity, chunk.first, chunk.end)))


def join_ids(
    base: Dataset, today: Dataset, drop_unseen: int | None, stages: Stages, at_once: int
) -> dict[Entity, JoinedInParts]:
    """Users and items after the day, by tasks of about `at_once` ids."""
    folder = stages.work.child("joined_ids")
    folder.make()
    for entity in ENTITIES:
        type_of_ids(base, today, entity)
    return {entity: _join(entity, base, today, drop_unseen, folder, stages, at_once) for entity in ENTITIES}


def _join(
    entity: Entity,
    base: Dataset,
    today: Dataset,
    drop_unseen: int | None,
    folder: Folder,
    stages: Stages,
    at_once: int,
) -> JoinedInParts:
    old, new = (
        _chunks(f"{entity}-{name}", dataset.manifest[entity], at_once)
        for name, dataset in (("base", base), ("today", today))
    )
    job = _Job(
        entity=entity,
        base=base,
        today=today,
        drop_unseen=drop_unseen,
        folder=folder,
        old=old,
        new=new,
        sizes_old=np.empty((0, len(old)), np.int64),
        sizes_new=np.empty((0, len(new)), np.int64),
    )
    both = range(len(old) + len(new))
    fences = [found["fences"] for found in stages.run(f"sorting {entity}", _sort, job, [(n,) for n in both])]
    bounds = ranges(splitters(fences, base.manifest[entity] + today.manifest[entity], at_once))
    calls = [(part, *bound) for part, bound in enumerate(bounds)]
    matched = stages.run(f"matching {entity}", _match, (job, fences), calls)
    sizes = np.array([found["sizes"] for found in matched], np.int64)
    job = replace(job, sizes_old=sizes[:, : len(old)], sizes_new=sizes[:, len(old) :])
    kept = stages.run(f"keeping {entity}", _keep, job, [(chunk,) for chunk in range(len(old))])
    joined = JoinedInParts(job, [found["kept"] for found in kept], [found["new"] for found in matched])
    stages.run(f"answering {entity}", _answer, joined, [(part,) for part in range(len(bounds))])
    stages.run(f"placing {entity}", _place, job, [(chunk,) for chunk in range(len(new))])
    return joined


def write_id_tables(ids: Mapping[Entity, JoinedInParts], stages: Stages, target: Folder) -> dict[str, Any]:
    """Writes the id tables of the day; gives their entries in the manifest."""
    return {
        entity: stages.run(f"writing {entity} of both", _table, (joined, target), [()])[0]["entry"]
        for entity, joined in ids.items()
    }


def _sort(job: _Job, number: int) -> dict[str, Any]:
    """Sorts the ids of a chunk, the base's first; `order` is the place in the chunk of each sorted one."""
    chunk = [*job.old, *job.new][number]
    raw = _raw_ids(job.base if number < len(job.old) else job.today, job, chunk)
    raw = raw.cast(type_of_ids(job.base, job.today, job.entity))
    order = pc.call_function("sort_indices", [raw])
    write_arrays(job.folder, f"{chunk.name}.order", [order.to_numpy().astype(np.int32)])
    return {"fences": write_ids(job.folder, f"{chunk.name}.ids", raw.take(order)), "rows": len(raw)}


def _match(context: tuple[_Job, Sequence[Sequence[Any]]], part: int, low: Any, high: Any) -> dict[str, Any]:
    """Finds the ids of a range that both have.

    A link is the place of an id among those of the base in this range, or, if it is new, -1 - its place among new ones.
    """
    job, fences = context
    chunks = [*job.old, *job.new]
    pieces = [read_ids(job.folder, f"{chunk.name}.ids", low, high, fence) for chunk, fence in zip(chunks, fences)]
    sizes = [len(piece) for piece in pieces]
    distinct, place = sorted_ids(pa.concat_arrays(pieces))
    old, new = np.split(place, [sum(sizes[: len(job.old)])])
    of_old, seen = np.full(len(distinct), -1, np.int32), np.zeros(len(distinct), bool)
    of_old[old], seen[new] = np.arange(len(old), dtype=np.int32), True
    added = of_old < 0
    links = np.where(added, -np.cumsum(added, dtype=np.int64), of_old)[new]
    write_arrays(job.folder, job.of_range(part, "seen"), [seen[old]])
    write_arrays(job.folder, job.of_range(part, "links"), [links.astype(np.int32)])
    write_ids(job.folder, job.of_range(part, "ids"), distinct.filter(pa.array(added)))
    return {"sizes": sizes, "new": int(np.count_nonzero(added)), "rows": len(place)}


def _keep(job: _Job, number: int) -> dict[str, Any]:
    """Numbers the ids of a chunk of the base that are kept, by its own order and (`sorted`) by that of the ids."""
    chunk = job.old[number]
    order = _read(job.folder, chunk, "order", _INDEX)
    last_seen = last_seen_of(job.base, job.entity, chunk.first, chunk.end).copy()
    last_seen[order[job.collected("seen", _FLAG, job.sizes_old, number)]] = job.day
    kept = np.ones(len(order), bool) if job.drop_unseen is None else job.day - last_seen < job.drop_unseen
    index = np.where(kept, np.cumsum(kept) - 1, GONE).astype(np.int32)
    for kind, content in (("index", index), ("sorted", index[order]), ("last_seen", last_seen)):
        write_arrays(job.folder, f"{chunk.name}.{kind}", [content])
    return {"kept": int(np.count_nonzero(kept)), "rows": len(index)}


def _answer(joined: JoinedInParts, part: int) -> dict[str, Any]:
    """The new index of each id of today in a range."""
    job = joined.job
    starts, ends = (job.sizes_old[:upto].sum(axis=0).tolist() for upto in (part, part + 1))
    known = [
        _shifted(read_range(job.folder, f"{chunk.name}.sorted", _INDEX, start, end), first)
        for chunk, start, end, first in zip(job.old, starts, ends, joined.first_kept)
    ]
    size = int(job.sizes_new[part].sum())
    links = read_range(job.folder, job.of_range(part, "links"), _INDEX, 0, size)
    # A link of a new id is negative: what it takes from the end of `known` is not used.
    index = np.concatenate([np.empty(0, _INDEX), *known, np.zeros(1, _INDEX)])
    answers = np.where(links < 0, joined.first_added[part] - 1 - links, index[np.maximum(links, -1)])
    write_arrays(job.folder, job.of_range(part, "answers"), [answers.astype(np.int32)])
    return {"rows": size}


def _place(job: _Job, number: int) -> dict[str, Any]:
    """The new index of each id of a chunk of today, by its own order."""
    chunk = job.new[number]
    index = np.empty(chunk.end - chunk.first, _INDEX)
    index[_read(job.folder, chunk, "order", _INDEX)] = job.collected("answers", _INDEX, job.sizes_new, number)
    write_arrays(job.folder, f"{chunk.name}.index", [index])
    return {"rows": len(index)}


def _table(context: tuple[JoinedInParts, Folder]) -> dict[str, Any]:
    joined, target = context
    return {"entry": write_id_table(target, joined.job.entity, joined.pieces())}
