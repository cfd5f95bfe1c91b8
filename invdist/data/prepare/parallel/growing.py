"""`--onto` with workers: the day's data set and the one before it become one, with the bytes of `onto.Growth.write`.

    joining days      shards of both -> rows by the new ids, grouped by bucket
    cleaning days     buckets -> one row per pair, in random order
    splitting days    buckets -> ordered by split, once it is known how many rows of the past each bucket has
    writing days      ranges of the buckets' rows -> shards

The ids of both are joined before, in parts (`joining`): no process has all of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from invdist.data.dataset import Dataset
from invdist.data.prepare.onto import ROW, Growth, GrowthRules, columns_of
from invdist.data.prepare.options import Options
from invdist.data.prepare.parallel.arrays import bucketed, read_range, write_arrays
from invdist.data.prepare.parallel.driver import Sizes
from invdist.data.prepare.parallel.joining import join_ids, write_id_tables
from invdist.data.prepare.parallel.runs import Run, cut, read_runs, write_shard
from invdist.data.prepare.parallel.stages import Stages
from invdist.data.prepare.spill import BUCKETS
from invdist.data.prepare.writer import complete, encode
from invdist.data.schema import LABELED_SPLITS, SPLITS
from invdist.runtime.files import Folder

_WRITTEN = np.dtype([(name, ROW[name]) for name in ("user", "item", "label", "truth", "day", "replayed")])


@dataclass(frozen=True, kw_only=True)
class _Context:
    """What tasks of every stage know."""

    rules: GrowthRules
    base: Dataset
    today: Dataset
    work: Folder
    """Has the folders `joined`, `grown` and `sorted`."""
    target: Folder


class ParallelGrowth:
    """One growth on the Ray of this process; `stages` runs its tasks, `target` is where the data set goes."""

    def __init__(
        self, base: Dataset, today: Dataset, options: Options, stages: Stages, target: Folder, sizes: Sizes
    ) -> None:
        self.stages, self.target, self._chunk_rows, work = stages, target, sizes.chunk_rows, stages.work
        target.make()
        ids = join_ids(base, today, options.drop_unseen, stages, sizes.part_ids)
        self.growth = growth = Growth(base, today, options, ids)
        self._files = write_id_tables(ids, stages, target)
        self.job = _Context(rules=growth.rules, base=base, today=today, work=work, target=target)
        for name in ("joined", "grown", "sorted"):
            work.child(name).make()

    def run(self) -> dict[str, Any]:
        """Does all stages, and gives the manifest of what is in the target. It is not written yet."""
        growth, files = self.growth, dict(self._files)
        calls = [(number, *shard) for number, shard in enumerate(growth.shards())]
        joined = self.stages.run("joining days", _join, self.job, calls)
        total = sum(result["rows"] for result in joined)
        together = max(1, self._chunk_rows * BUCKETS // max(2 * total, 1))
        groups = [range(start, min(start + together, BUCKETS)) for start in range(0, BUCKETS, together)]
        edges = [result["edges"] for result in joined]
        cleaned = self.stages.run("cleaning days", _clean, (self.job, edges), [(group,) for group in groups])
        self.job.work.child("joined").remove()
        shares = growth.rules.shares()
        calls = [
            (group[0], result["sizes"], [shares.take(past).tolist() for past in result["past"]])
            for group, result in zip(groups, cleaned, strict=True)
        ]
        layouts = self.stages.run("splitting days", _split, self.job, calls)
        shards, rows = self._write(calls, layouts)
        for result in (*joined, *cleaned):
            growth.counts.update(result["counts"])
        for name, path, table in growth.latent():
            files[name] = self._write_table(path, table)
        return complete(growth.manifest(rows["unclear"]), rows, files, shards)

    def _write(self, groups: list[Any], layouts: list[Any]) -> tuple[dict[str, Any], dict[str, int]]:
        runs: dict[str, list[Run]] = {split: [] for split in SPLITS}
        for (first, sizes, _), result in zip(groups, layouts, strict=True):
            at = 0
            for layout in result["layouts"]:
                for split, count in zip(SPLITS, layout, strict=True):
                    runs[split].append((f"{first:03d}", sum(sizes), at, at + count, False))
                    at += count
        calls = []
        for split in SPLITS:
            self.target.child(split).make()
            some = cut(runs[split], self.growth.options.shard_rows)
            calls += [(split, number, part) for number, part in enumerate(some)]
        self.target.child("truth").make()
        results = self.stages.run("writing days", _write_shard, self.job, calls)
        shards: dict[str, Any] = {name: [] for name in (*SPLITS, "truth")}
        rows, counts = dict.fromkeys(SPLITS, 0), self.growth.counts
        for split in LABELED_SPLITS:
            counts[f"{split} positives"] = counts[f"{split} negatives"] = 0
        for (split, _, _), result in zip(calls, results, strict=True):
            for name, entry in result["entries"].items():
                shards[name].append(entry)
            rows[split] += result["rows"]
            if split in LABELED_SPLITS:
                counts[f"{split} positives"] += result["positives"]
                counts[f"{split} negatives"] += result["rows"] - result["positives"]
        return shards, rows

    def _write_table(self, path: str, table: Any) -> dict[str, Any]:
        content, entry = encode(path, table)
        folder, _, name = path.rpartition("/")
        target = self.target.child(folder) if folder else self.target
        target.make()
        with target.create(name) as file:
            file.write(content)
        return entry


def _join(job: _Context, place: int, today: bool, split: str, number: int) -> dict[str, Any]:
    """Reads a shard, and groups its rows by bucket."""
    counts: Counter[str] = Counter()
    batches = job.rules.read(job.today if today else job.base, today, split, number, counts)
    rows = np.concatenate([np.empty(0, ROW), *batches])
    grouped, edges = bucketed(rows, job.rules.bucket(rows), BUCKETS)
    write_arrays(job.work.child("joined"), f"{place:06d}", [grouped])
    return {"rows": len(rows), "counts": counts, "edges": edges}


def _clean(context: tuple[_Context, list[list[int]]], group: range) -> dict[str, Any]:
    """Cleans some buckets into one file; gives the rows of each, and how many of them are of the past."""
    job, edges = context
    counts: Counter[str] = Counter()
    # The buckets of a group follow each other in every file: one read for all of them.
    spans = [ends[group[0] : group[-1] + 2] for ends in edges]
    files = [
        (read_range(job.work.child("joined"), f"{place:06d}", ROW, span[0], span[-1]), np.array(span) - span[0])
        for place, span in enumerate(spans)
        if span[0] < span[-1]
    ]
    cleaned = []
    for number, bucket in enumerate(group):
        parts = [rows[slice(*span[number : number + 2])] for rows, span in files]
        cleaned.append(job.rules.clean(bucket, np.concatenate([np.empty(0, ROW), *parts]), counts))
    write_arrays(job.work.child("grown"), f"{group[0]:03d}", cleaned)
    past = [int(np.count_nonzero(job.rules.past(rows))) for rows in cleaned]
    sizes = [len(rows) for rows in cleaned]
    return {"counts": counts, "sizes": sizes, "past": past, "rows": sum(sizes)}


def _split(job: _Context, first: int, sizes: list[int], shares: list[list[int]]) -> dict[str, Any]:
    """Orders the rows of each bucket by split, and writes them column by column."""
    name = f"{first:03d}"
    rows = read_range(job.work.child("grown"), name, ROW, 0, sum(sizes)).copy()
    ends, layouts, ordered = np.cumsum(sizes), [], []
    for bucket, take in zip(np.split(rows, ends[:-1]), shares, strict=True):
        bucket["split"][job.rules.past(bucket)] = np.repeat(np.arange(len(take)), take)
        ordered.append(bucket[np.argsort(bucket["split"], kind="stable")])
        layouts.append(np.bincount(bucket["split"], minlength=len(SPLITS)).tolist())
    arranged = np.concatenate(ordered)
    write_arrays(job.work.child("sorted"), name, [arranged[column] for column in _WRITTEN.names or ()])
    return {"layouts": layouts, "rows": len(arranged)}


def _write_shard(job: _Context, split: str, number: int, runs: list[Run]) -> dict[str, Any]:
    """Writes one shard of a split."""
    names, folder = columns_of(split), job.work.child("sorted")
    parts = [part for _, part in read_runs(folder, _WRITTEN, runs, names)]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in names}
    return write_shard(job.target, split, number, columns)
