"""Prepares a data set in many processes: the same rules, counts and bytes as `pipeline.prepare`, in bounded memory.

    read      pieces of the log -> chunks of records in log order, each with its sorted distinct ids
    number    ids by ranges -> indices (`id_parts`)
    route     chunks -> records with indices, grouped by bucket
    clean     buckets -> one row per pair, labeled, in random order
    split     buckets -> ordered by split (split=time, after the cuts are found)
    write     ranges of the buckets' rows -> shards

A bucket takes its records from the chunks in their order, so it has what it has in one process. Which rows of a bucket
are in which split, and where a shard begins, follows from the sizes of all buckets, known before `write`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from invdist.data.prepare.ids import MOST, ids_of_text, same_type
from invdist.data.prepare.labeling import Labeling
from invdist.data.prepare.logs import note_times
from invdist.data.prepare.options import Options
from invdist.data.prepare.parallel import tasks
from invdist.data.prepare.parallel.id_parts import NumberedIds, ranges, splitters
from invdist.data.prepare.parallel.runs import Run, cut
from invdist.data.prepare.parallel.stages import Stages
from invdist.data.prepare.pipeline import all_shares, describe_rows, no_labels
from invdist.data.prepare.quantiles import find_prefixes, values_of
from invdist.data.prepare.raw_log import RawLog
from invdist.data.prepare.row_rules import RowRules, quartile_ranks
from invdist.data.prepare.since_until import TooLittle, no_rows
from invdist.data.prepare.spill import BUCKETS
from invdist.data.prepare.split_rule import SplitRule, time_ranks
from invdist.data.prepare.writer import complete, encode
from invdist.data.schema import LABELED_SPLITS, SPLITS
from invdist.runtime.errors import UserError
from invdist.runtime.files import Folder
from invdist.runtime.paths import AnyPath, path_as_given


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How the work is cut: what a process has in memory at a time. The result does not depend on it."""

    chunk_rows: int = 1 << 20
    """Records of a chunk."""
    piece_bytes: int = 64 << 20
    """Bytes of a CSV file that one task reads."""
    part_ids: int = 1 << 20
    """Ids of a part, those of every chunk counted."""


class ParallelPreparation:
    """One run of `prepare` on the Ray of this process; `stages` runs its tasks, `target` is where the data set goes."""

    def __init__(
        self, log: RawLog, labeling: Labeling, options: Options, stages: Stages, target: Folder, sizes: Sizes
    ) -> None:
        self.log, self.labeling, self.options, self.stages, self.sizes = log, labeling, options, stages, sizes
        self.rule = SplitRule(log, options)
        self.work, self.target = stages.work, target
        for folder in (*(self.work.child(name) for name in ("chunks", "ids", "buckets", "clean", "split")), target):
            folder.make()
        self.counts: Counter[str] = Counter()
        self.finish_rates: dict[str, float] | None = None
        self.quartiles: tuple[float, float] | None = None
        self.files: dict[str, Any] = {}
        self._finds = 0

    @property
    def job(self) -> tasks.Context:
        """What tasks are told."""
        rules = RowRules(self.log, self.labeling, self.options)
        rows = self.sizes.chunk_rows
        return tasks.Context(
            log=self.log, rules=rules, rule=self.rule, work=self.work, target=self.target, chunk_rows=rows
        )

    def run(self) -> dict[str, Any]:
        """Does all stages, and gives the manifest of what is in the target. It is not written yet."""
        chunks = self._read()
        if universe := self.log.universe():
            self.users, self.items = universe
            self._write_id_tables({"users": None, "items": None})
        else:
            chunks = self._route(chunks)
        self.work.child("chunks").remove()
        self._measure(chunks)
        folder, groups = self._clean(chunks)
        shards, rows = self._write(folder, groups)
        self._write_latent()
        if self.rule.given is not None:
            self.rule.given.check_all_found()
        return complete(describe_rows(self, self.rule, rows["unclear"]), rows, self.files, shards)

    def _read(self) -> list[dict[str, Any]]:
        pieces = self.log.pieces(self.sizes.chunk_rows, self.sizes.piece_bytes)
        if self.log.looks:
            looked = self.stages.run("looking at ids", tasks.look, self.job, [(piece,) for piece in pieces])
            self.log.after_look([found["found"] for found in looked])
        results = self.stages.run("reading", tasks.read, self.job, list(enumerate(pieces)))
        if any(result["owed"] for result in results[:-1]):
            # A block of a synthetic feed had too few clear rows; the next ones must have more, in turn.
            whole = [(len(pieces), (0, len(pieces)))]
            results = self.stages.run("reading in turn", tasks.read, self.job, whole)
        self.types: dict[str, pa.DataType] = {}
        times: dict[str, AnyPath] = {}
        for result in results:
            self.counts.update(result["counts"])
            self.counts["log_rows"] += result["rows"]
            for entity, kind in result["types"].items():
                self.types[entity] = same_type(entity, self.types.get(entity), pa.type_for_alias(kind))
            note_times(times, {kind: path_as_given(file) for kind, file in result["times"].items()})
        if not self.counts["log_rows"]:
            raise no_rows(self.log)
        return [chunk for result in results for chunk in result["chunks"]]

    def _route(self, chunks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Numbers the ids, and puts the chunks into buckets."""
        files = {
            entity: ([f"{chunk['name']}.{entity}" for chunk in chunks], [chunk[entity]["fences"] for chunk in chunks])
            for entity in ("users", "items")
        }
        cuts, calls = {}, []
        for entity, (_, fences) in files.items():
            total = sum(chunk[entity]["ids"] for chunk in chunks)
            cuts[entity] = splitters(fences, total, self.sizes.part_ids)
            calls += [(entity, part, low, high) for part, (low, high) in enumerate(ranges(cuts[entity]))]
        found = self.stages.run("numbering ids", tasks.number, (self.job, files), calls)
        ids: dict[str, NumberedIds] = {}
        for entity, where in cuts.items():
            parts = [part for part, call in zip(found, calls) if call[0] == entity]
            ids[entity] = NumberedIds(entity, where, parts, self.work.child("ids"))
            if len(ids[entity]) > MOST:
                raise UserError(f"more than {MOST} distinct {entity[:-1]} ids; indices are 32-bit")
        self.users, self.items = len(ids["users"]), len(ids["items"])
        if not (self.users and self.items):
            raise TooLittle("no row of the log has both a user and an item")
        if self.rule.given is not None:
            self.rule.given.resolve(self._finder(ids["users"], "user"), self._finder(ids["items"], "item"), self.items)
        self._write_id_tables(ids)
        context = (self.job, ids["users"], ids["items"])
        calls = [(number, chunk["name"], chunk["rows"]) for number, chunk in enumerate(chunks)]
        return self.stages.run("routing", tasks.route, context, calls)

    def _finder(self, ids: NumberedIds, entity: str):
        """Looks ids of a given split up in the parts that may have them."""
        kind = self.types[entity]

        def find(raw: list[str]) -> np.ndarray:
            values = ids_of_text(raw, kind)
            part = np.array([-1 if value is None else bisect_right(ids.cuts, value) for value in values])
            asked = [(number, np.flatnonzero(part == number)) for number in range(len(ids.cuts) + 1)]
            asked = [(number, rows) for number, rows in asked if len(rows)]
            calls = [(number, [values[row] for row in rows]) for number, rows in asked]
            self._finds += 1
            found = self.stages.run(f"given ids {self._finds}", tasks.find, (self.job, ids), calls)
            index = np.full(len(raw), -1, np.int64)
            for (_, rows), result in zip(asked, found):
                index[rows] = result["index"]
            return index

        return find

    def _write_id_tables(self, ids: dict[str, NumberedIds] | dict[str, None]) -> None:
        for name, numbered in ids.items():
            context = (self.job, numbered, getattr(self, name))
            (result,) = self.stages.run(f"writing {name}", tasks.table, context, [(name,)])
            self.files[name] = result["entry"]

    def _measure(self, chunks: Sequence[dict[str, Any]]) -> None:
        """Finds the quartiles of play times and the finish rates."""
        if "play_time" in self.labeling.rules:
            rows = sum(chunk["rows"] for chunk in chunks) - self.counts["bad_play_times"]
            if not rows:
                raise TooLittle("rule play_time: no row has a play time of zero or more")
            sources = [(chunk["name"], chunk["rows"]) for chunk in chunks]
            lower, upper = self._order_statistics(
                "quartiles", tasks.count_play_times, sources, quartile_ranks(rows), np.float64
            )
            self.quartiles = float(lower), float(upper)
            if self.labeling.quartiles is None:  # otherwise they are those of the first day
                self.labeling = replace(self.labeling, quartiles=self.quartiles)
        (result,) = self.stages.run("finish rates", tasks.finish_rates, (self.job, self._grouped(chunks)), [()])
        self.finish_rates = result["rates"]

    def _order_statistics(
        self, stage: str, count: Any, sources: Sequence[tuple], ranks: list[int], dtype: Any
    ) -> list[float | int]:
        def counts(shift: int, prefixes: Sequence[int]) -> np.ndarray:
            calls = [(*source, shift, prefixes) for source in sources]
            found = self.stages.run(f"{stage} by bits from {shift}", count, self.job, calls)
            return tasks.dense(found, len(prefixes))

        return values_of(find_prefixes(counts, ranks), np.dtype(dtype))

    def _clean(self, chunks: Sequence[dict[str, Any]]) -> tuple[str, list[tasks.Group]]:
        """Cleans and splits all buckets; gives the folder they are in, and the groups that share a file there."""
        self.rule.items = self.items
        groups = self._over(self._grouped(chunks), "cleaning", tasks.clean, (self.job, self.items))
        self.work.child("buckets").remove()
        if not self.rule.by_time:
            self._note_given(groups)
            return "clean", groups
        labeled = sum(layout[0] for group in groups for _, layout in group)
        if not labeled:
            raise no_labels(self.labeling.rules, self.finish_rates)
        cuts = self._order_statistics(
            "time cuts", tasks.count_times, [(group,) for group in groups], time_ranks(labeled, self.options), np.int64
        )
        self.rule.time_cuts = int(cuts[0]), int(cuts[1])
        return "split", self._over(groups, "splitting", tasks.split, self.job)

    def _grouped(self, chunks: Sequence[dict[str, Any]]) -> list[tasks.Buckets]:
        """All buckets, small ones together, so that tasks and files cost little."""
        buckets = [(bucket, _segments(chunks, bucket)) for bucket in range(BUCKETS)]
        rows = sum(chunk["rows"] for chunk in chunks)
        together = max(1, self.sizes.chunk_rows * BUCKETS // max(2 * rows, 1))
        return [buckets[start : start + together] for start in range(0, BUCKETS, together)]

    def _over(self, groups: Sequence[list[tuple[int, Any]]], stage: str, task: Any, context: Any) -> list[tasks.Group]:
        """The groups of buckets with their layouts after a task that writes their files."""
        results = self.stages.run(stage, task, context, [(group,) for group in groups])
        for result in results:
            self.counts.update(result["counts"])
        return [
            [(number, layout) for (number, _), layout in zip(group, result["layouts"], strict=True)]
            for group, result in zip(groups, results, strict=True)
        ]

    def _note_given(self, groups: Sequence[tasks.Group]) -> None:
        if self.rule.given is not None:
            for _, layout in chain.from_iterable(groups):
                self.rule.given.note(np.repeat(np.arange(3), layout[:3]))

    def _write(self, folder: str, groups: Sequence[tasks.Group]) -> tuple[dict[str, Any], dict[str, int]]:
        """Writes all shards; gives their entries and the rows of each split."""
        runs = self._runs(groups)
        calls = []
        for split in SPLITS:
            self.target.child(split).make()
            calls += [(split, number, part) for number, part in enumerate(cut(runs[split], self.options.shard_rows))]
        self.target.child("truth").make()
        results = self.stages.run("writing", tasks.write, (self.job, folder), calls)
        shards: dict[str, Any] = {name: [] for name in (*SPLITS, "truth")}
        rows = dict.fromkeys(SPLITS, 0)
        for (split, _, _), result in zip(calls, results):
            for name, entry in result["entries"].items():
                shards[name].append(entry)
            rows[split] += result["rows"]
            if split in LABELED_SPLITS:
                self.counts[f"{split} positives"] += result["positives"]
                self.counts[f"{split} negatives"] += result["rows"] - result["positives"]
        return shards, rows

    def _runs(self, groups: Sequence[tasks.Group]) -> dict[str, list[Run]]:
        """The rows of each split, bucket by bucket, in their order."""
        split_shares, label_shares, training_shares = all_shares(self.options)
        runs: dict[str, list[Run]] = {split: [] for split in SPLITS}
        by_order = not (self.rule.by_time or self.rule.days or self.rule.given)
        for group in groups:
            file, rows, start = tasks.file_of(group), sum(sum(layout) for _, layout in group), 0
            for _, (train, valid, test, unclear) in group:
                if by_order:
                    train, valid, test = split_shares.take(train).tolist()
                kept, hidden = label_shares.take(train).tolist()
                learned, tried = training_shares.take(kept).tolist()
                self.counts["hidden_labels"] += hidden
                edges = np.cumsum([start, learned, tried, hidden, valid, test, unclear]).tolist()
                parts = ("train", "training_test", "hidden", "valid", "test", "unclear")
                at = {part: (file, rows, *edges[n : n + 2]) for n, part in enumerate(parts)}
                for split in SPLITS:
                    runs[split].append((*at[split], False))
                runs["unclear"].append((*at["hidden"], True))
                start = edges[-1]
        return runs

    def _write_latent(self) -> None:
        """Writes what is known of a synthetic feed."""
        for name, table in self.log.latent().items():
            if self.log.universe() is None:  # raw ids are the row numbers of these tables
                with self.target.open(f"{name}.parquet") as file:
                    table = table.take(pq.read_table(file, columns=["raw"])["raw"])
            content, self.files[f"latent_{name}"] = encode(f"latent/{name}.parquet", table)
            self.target.child("latent").make()
            with self.target.child("latent").create(f"{name}.parquet") as file:
                file.write(content)


def _segments(chunks: Sequence[dict[str, Any]], bucket: int) -> list[tasks.Segment]:
    """Where the records of a bucket are, in the order of the log."""
    edges = [(chunk["name"], *chunk["edges"][bucket : bucket + 2]) for chunk in chunks]
    return [segment for segment in edges if segment[1] < segment[2]]
