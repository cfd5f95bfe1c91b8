"""The tasks of `driver`, in the order of its stages: functions of their arguments and of files that are whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from invdist.data.prepare.parallel.arrays import bucketed, read_columns, read_range, write_arrays
from invdist.data.prepare.parallel.id_parts import NumberedIds, number_part, sorted_ids, write_ids
from invdist.data.prepare.parallel.id_tables import write_id_table
from invdist.data.prepare.parallel.runs import Run, read_runs, write_shard
from invdist.data.prepare.quantiles import digit_counts
from invdist.data.prepare.raw_log import RawLog
from invdist.data.prepare.row_rules import RowRules, pair_of_indices, pair_of_words
from invdist.data.prepare.spill import BUCKETS
from invdist.data.prepare.split_rule import SplitRule
from invdist.data.prepare.splitting import TRAIN
from invdist.data.schema import UNCLEAR_LABEL
from invdist.runtime.files import Folder

Segment = tuple[str, int, int]
"""A file and the range of its records."""
Buckets = list[tuple[int, list[Segment]]]
"""Buckets that follow each other: (number, where its records are, in the order of the log)."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What tasks of every stage know."""

    log: RawLog
    rules: RowRules
    rule: SplitRule
    work: Folder
    """Has the folders `chunks`, `ids`, `buckets`, `clean`, `split`."""
    target: Folder
    """The folder of the data set."""
    chunk_rows: int

    @property
    def clean_dtype(self) -> np.dtype:
        """The columns of the files of clean rows."""
        fields: list[tuple[str, type]] = [("user", np.int32), ("item", np.int32), ("label", np.int8)]
        fields += [("truth", np.float32)] * self.rules.has_truth + [("time", np.int64)] * self.rule.by_time
        return np.dtype(fields)


def look(job: Context, piece: Any) -> dict[str, Any]:
    """What reading needs to know of a piece of the log before any is read."""
    return {"found": job.log.look(piece)}


def read(job: Context, number: int, piece: Any) -> dict[str, Any]:
    """Reads a piece of the log into chunks of records, with their distinct ids, or into buckets if ids are indices."""
    counts: Counter[str] = Counter()
    chunks: list[dict[str, Any]] = []
    types: dict[str, str] = {}
    pending: list[tuple[np.ndarray, pa.RecordBatch]] = []
    rows = 0

    def flush() -> None:
        records = np.concatenate([part for part, _ in pending])
        table = pa.Table.from_batches([ids for _, ids in pending])
        pending.clear()
        name = f"{number:06d}-{len(chunks):04d}"
        chunks.append(_write_chunk(job, name, records, table))

    for batch in job.log.read(piece):
        rows += batch.num_rows
        batch = job.rules.with_ids(batch, counts)
        for entity in ("user", "item"):
            types[entity] = str(batch[entity].type)
        pending.append((job.rules.records(batch, counts), batch.select(["user", "item"])))
        if sum(len(part) for part, _ in pending) >= job.chunk_rows:
            flush()
    if pending:
        flush()
    kinds = {kind: str(file) for kind, file in getattr(job.log, "times", {}).items()}
    owed = getattr(job.log, "owed", 0)
    return {"rows": rows, "counts": counts, "chunks": chunks, "types": types, "times": kinds, "owed": owed}


def _write_chunk(job: Context, name: str, records: np.ndarray, ids: pa.Table) -> dict[str, Any]:
    if job.log.universe():
        records["user"], records["item"] = ids["user"].to_numpy(), ids["item"].to_numpy()
        return _write_buckets(job, name, records, pair_of_indices(records["user"], records["item"]))
    chunk: dict[str, Any] = {"name": name, "rows": len(records)}
    for entity in ("user", "item"):
        distinct, records[entity] = sorted_ids(ids[entity].combine_chunks())
        fences = write_ids(job.work.child("chunks"), f"{name}.{entity}s", distinct)
        chunk[f"{entity}s"] = {"ids": len(distinct), "fences": fences}
    write_arrays(job.work.child("chunks"), f"{name}.rows", [records])
    return chunk


def _write_buckets(job: Context, name: str, records: np.ndarray, pair: np.ndarray) -> dict[str, Any]:
    grouped, edges = bucketed(records, job.rules.bucket(pair), BUCKETS)
    write_arrays(job.work.child("buckets"), name, [grouped])
    return {"name": name, "rows": len(records), "edges": edges}


def number(
    context: tuple[Context, dict[str, tuple[Sequence[str], Sequence[Any]]]],
    entity: str,
    part: int,
    low: Any,
    high: Any,
) -> dict[str, Any]:
    """Numbers the ids of one part; the context has the files and fences of each entity's chunks."""
    job, chunks = context
    names, fences = chunks[entity]
    target = job.work.child("ids")
    return number_part(job.work.child("chunks"), names, fences, low, high, target, f"{entity}-{part:05d}")


def route(context: tuple[Context, NumberedIds, NumberedIds], number: int, name: str, rows: int) -> dict[str, Any]:
    """Gives the records of a chunk their indices, and puts them into buckets."""
    job, users, items = context
    records = read_range(job.work.child("chunks"), f"{name}.rows", job.rules.dtype, 0, rows).copy()
    words = []
    for ids, entity in ((users, "user"), (items, "item")):
        index, word = ids.of_chunk(number)
        words.append(word[records[entity]])
        records[entity] = index[records[entity]]
    return _write_buckets(job, name, records, pair_of_words(*words))


def table(context: tuple[Context, NumberedIds | None, int], name: str) -> dict[str, Any]:
    """Writes `users.parquet` or `items.parquet` part by part, as one table would be written."""
    job, ids, count = context
    parts = (ids.part(part) for part in range(len(ids.first) - 1)) if ids is not None else [pa.array(np.arange(count))]
    return {"entry": write_id_table(job.target, name, (pa.table({"raw": raw}) for raw in parts))}


def find(context: tuple[Context, NumberedIds], part: int, values: list[Any]) -> dict[str, Any]:
    """Final indices of ids among those of one part."""
    _, ids = context
    return {"index": ids.find(part, pa.array(values, ids.part(part).type)).tolist()}


def finish_rates(context: tuple[Context, list[Buckets]]) -> dict[str, Any]:
    """Quantiles of finish rates, of buckets in groups."""
    job, groups = context
    return {"rates": job.rules.finish_rates(chain.from_iterable(_records(job, group) for group in groups))}


def _records(job: Context, buckets: Buckets) -> Iterator[np.ndarray]:
    """The records of buckets that follow each other. They do so in every file, too: one read for all of them."""
    spans: dict[str, Segment] = {}
    for name, start, stop in chain.from_iterable(segments for _, segments in buckets):
        spans[name] = name, spans.get(name, (name, start))[1], stop
    files = {name: (span[1], read_range(job.work.child("buckets"), *_of(job, span))) for name, span in spans.items()}
    for _, segments in buckets:
        found = ((*files[name], start, stop) for name, start, stop in segments)
        parts = [rows[start - first : stop - first] for first, rows, start, stop in found]
        yield np.concatenate([np.empty(0, job.rules.dtype), *parts])


def _of(job: Context, segment: Segment) -> tuple[str, np.dtype, int, int]:
    return segment[0], job.rules.dtype, segment[1], segment[2]


def count_play_times(job: Context, name: str, rows: int, shift: int, prefixes: tuple[int, ...]) -> dict[str, Any]:
    """Digits (see `quantiles`) of the play times of a chunk."""
    played = read_range(job.work.child("buckets"), name, job.rules.dtype, 0, rows)["play_time"]
    return _sparse(digit_counts(played[played >= 0], shift, prefixes))


Group = list[tuple[int, list[int]]]
"""Buckets whose clean rows are in one file, which has the name of the first: (number, layout), see `_arranged`."""


def count_times(job: Context, group: Group, shift: int, prefixes: tuple[int, ...]) -> dict[str, Any]:
    """Digits of the times of labeled rows."""
    rows = _clean_rows(job, group, ["time"])
    times = np.concatenate([rows[at : at + layout[0]]["time"] for at, layout in _places(group)])
    return _sparse(digit_counts(times, shift, prefixes))


def _clean_rows(job: Context, group: Group, names: Sequence[str]) -> np.ndarray:
    total = sum(sum(layout) for _, layout in group)
    columns = read_columns(job.work.child("clean"), file_of(group), job.clean_dtype, total, 0, total, names)
    rows = np.empty(total, np.dtype([(name, job.clean_dtype[name]) for name in names]))
    for name, column in columns.items():
        rows[name] = column
    return rows


def _places(group: Group) -> Iterator[tuple[int, list[int]]]:
    """(where its rows begin, layout) of each bucket of a group."""
    at = 0
    for _, layout in group:
        yield at, layout
        at += sum(layout)


def file_of(group: Sequence[tuple[int, Any]]) -> str:
    """The name of the file of some buckets."""
    return f"{group[0][0]:03d}"


def _sparse(counts: np.ndarray) -> dict[str, Any]:
    found = [np.flatnonzero(row) for row in counts]
    return {"digits": [[at.tolist(), row[at].tolist()] for at, row in zip(found, counts)]}


def dense(results: Sequence[dict[str, Any]], prefixes: int) -> np.ndarray:
    """The sum of what several tasks counted (int64 [prefixes, 65536])."""
    counts = np.zeros((prefixes, 1 << 16), np.int64)
    for result in results:
        for row, (at, count) in zip(counts, result["digits"]):
            row[at] += np.array(count, np.int64)
    return counts


def clean(context: tuple[Context, int], buckets: Buckets) -> dict[str, Any]:
    """Cleans buckets into one file, their rows ordered by split as far as it is known: see `_arranged`."""
    job, items = context
    counts: Counter[str] = Counter()
    records = zip(buckets, _records(job, buckets), strict=True)
    parts = (job.rules.clean(number, rows, items, counts) for (number, _), rows in records)
    return _write_clean(job, "clean", file_of(buckets), parts, counts)


def split(job: Context, group: Group) -> dict[str, Any]:
    """Orders the clean rows of a group by their split."""
    rows = _clean_rows(job, group, job.clean_dtype.names or ())
    parts = (rows[at : at + sum(layout)] for at, layout in _places(group))
    return _write_clean(job, "split", file_of(group), parts, Counter())


def _write_clean(
    job: Context, folder: str, name: str, buckets: Iterable[np.ndarray], counts: Counter[str]
) -> dict[str, Any]:
    """Writes the rows of buckets into one file, column by column."""
    names = job.clean_dtype.names or ()
    layouts, parts = [], []
    for rows in buckets:
        layout, arranged = _arranged(job.rule, rows, counts)
        layouts.append(layout)
        parts.append({name: np.ascontiguousarray(arranged[name]) for name in names})
    columns = [np.concatenate([part[name] for part in parts]) for name in names]
    write_arrays(job.work.child(folder), name, columns)
    return {"counts": counts, "layouts": layouts, "rows": sum(map(sum, layouts))}


def _arranged(rule: SplitRule, rows: np.ndarray, counts: Counter[str]) -> tuple[list[int], np.ndarray]:
    """(how many rows are train, valid, test and unclear; the rows in this order).

    Labeled rows whose split is not known yet, or decided by their order, are all under train.
    """
    unclear, labeled = (rows[mask] for mask in (rows["label"] == UNCLEAR_LABEL, rows["label"] != UNCLEAR_LABEL))
    if (period := rule.period(unclear)) is not None:
        counts["unclear_after_training"] += int(np.count_nonzero(period != TRAIN))
        unclear = unclear[period == TRAIN]
    layout = [len(labeled), 0, 0]
    if (part := rule.of_labeled(labeled)) is not None:
        labeled = labeled[np.argsort(part, kind="stable")]
        layout = np.bincount(part, minlength=3).tolist()
    return [*layout, len(unclear)], np.concatenate([labeled, unclear])


def write(context: tuple[Context, str], split: str, number: int, runs: list[Run]) -> dict[str, Any]:
    """Writes one shard of a split, from the files of clean rows in the folder that the context names."""
    job, folder = context
    parts = list(_shard_columns(job, folder, split, runs))
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return write_shard(job.target, split, number, columns)


def _shard_columns(job: Context, folder: str, split: str, runs: list[Run]) -> Iterator[dict[str, np.ndarray]]:
    """The columns that are written of each run."""
    names = ["user", "item", "label", *(["truth"] if job.rules.has_truth else [])]
    for (_, _, start, stop, hidden), columns in read_runs(job.work.child(folder), job.clean_dtype, runs, names):
        label = columns.pop("label")
        if split != "unclear":
            columns = {"user": columns["user"], "item": columns["item"], "label": label}
        elif hidden:
            columns["truth"] = label.astype(np.float32)
        elif not job.rules.has_truth:
            columns["truth"] = np.full(stop - start, np.nan, np.float32)
        yield columns
