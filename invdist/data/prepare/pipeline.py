"""From a raw log to a prepared data set, in bounded memory.

One pass over the log maps ids and throws every row into one of 128 buckets on disk, by a seeded hash of its
(user, item) pair. So duplicates of a pair meet in one bucket, and buckets read in turn, each permuted, are a random
order of all rows. A second pass labels, removes duplicates, splits and writes bucket by bucket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from invdist.data import hashing
from invdist.data.prepare.given import GivenSplit
from invdist.data.prepare.ids import IdMap, id_table
from invdist.data.prepare.labeling import Labeling
from invdist.data.prepare.log import RawLog
from invdist.data.prepare.quantiles import order_statistics
from invdist.data.prepare.spill import BUCKETS, Spill
from invdist.data.prepare.splitting import TEST, TRAIN, VALID, Shares, by_time
from invdist.data.prepare.writer import DatasetWriter, new_dataset
from invdist.data.schema import LABELED, UNCLEAR_LABEL
from invdist.runtime.errors import UserError

RULES = 4
"""Raised when a log would be prepared into other rows, or into the same in another order, than by the rules before:
figures of before are then not those of the same command now, and what is kept of a recipe is made again."""

COUNTS = (
    "log_rows",
    "missing_ids",
    "bad_durations",
    "bad_play_times",
    "missing_ratings",
    "exact_duplicates",
    "repeated_pairs",
    "unclear_after_training",
    "hidden_labels",
)
"""What was met in the log and handled by a stated rule (docs/data.md), by the names in the manifest."""

Progress = Callable[[str, int], None]
"""Called with what is being done and how many rows are through."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How rows are divided, and which labels are kept."""

    split: str = "seed"
    seed: int = 0
    valid_fraction: float = 0.2
    test_fraction: float = 0.2
    training_test_fraction: float = 0.1
    label_fraction: float = 1.0
    duplicates: str = "last"

    @property
    def fractions(self) -> tuple[float, float, float]:
        """Fractions of train (with training_test), valid and test."""
        return (1 - self.valid_fraction - self.test_fraction, self.valid_fraction, self.test_fraction)


def prepare(
    log: RawLog,
    labeling: Labeling,
    cut: Cut,
    output: Path,
    *,
    given: GivenSplit | None = None,
    shard_rows: int = 1 << 20,
    progress: Progress = lambda stage, rows: None,
) -> dict[str, Any]:
    """Writes the prepared data set of `log` to the new folder `output` and gives its manifest."""
    if cut.split == "time" and not log.has_time:
        raise UserError("split=time needs a time in the log; name its column, or split=seed")
    with new_dataset(output, shard_rows) as writer:
        run = _Preparation(log, labeling, cut, given, writer, progress)
        try:
            return run.run()
        finally:
            run.remove_spill()


class _Preparation:
    """The state of one `prepare`: the spilled rows, the id maps and the counters."""

    def __init__(
        self,
        log: RawLog,
        labeling: Labeling,
        cut: Cut,
        given: GivenSplit | None,
        writer: DatasetWriter,
        progress: Progress,
    ) -> None:
        self.log, self.labeling, self.cut, self.given = log, labeling, cut, given
        self.writer, self.progress = writer, progress
        self.counts: Counter[str] = Counter()
        self.user_ids, self.item_ids = IdMap("user"), IdMap("item")
        fields = [("user", np.int32), ("item", np.int32), *((name, np.float64) for name in labeling.columns)]
        fields += [("time", np.int64)] * log.has_time + [("truth", np.float32)] * log.has_truth
        self.spill = Spill(writer.folder / "spill", np.dtype(fields))

    def remove_spill(self) -> None:
        if self.spill.folder.exists():
            self.spill.remove()

    def run(self) -> dict[str, Any]:
        self._spill_log()
        self._finish_ids()
        if "play_time" in self.labeling.rules:
            self.labeling = replace(self.labeling, quartiles=self._quartiles())
        self._time_cuts = self._find_time_cuts() if self.cut.split == "time" else None
        if self.given is not None:
            self.given.resolve(self.user_ids, self.item_ids, self.final_user, self.final_item, self.items)
        self._write_rows()
        self.spill.remove()
        for name, table in self.log.latent().items():
            self.writer.add_table(f"latent_{name}", f"latent/{name}.parquet", table)
        return self._finish()

    # Pass 1: the log, once.

    def _spill_log(self) -> None:
        rows = 0
        for batch in self.log.batches():
            rows += batch.num_rows
            batch = self._with_ids(batch)
            records = np.empty(batch.num_rows, self.spill.dtype)
            if self.log.universe():
                records["user"], records["item"] = batch["user"].to_numpy(), batch["item"].to_numpy()
            else:
                records["user"] = self.user_ids.provisional(batch["user"])
                records["item"] = self.item_ids.provisional(batch["item"])
            for name in self.spill.dtype.names[2:]:  # type: ignore[index]
                records[name] = batch[name].to_numpy(zero_copy_only=False)
            self._count_bad_values(records)
            self.spill.append(records, self._bucket(records))
            self.progress("reading", rows)
        self.spill.close()
        self.counts["log_rows"] = rows
        if not rows:
            raise UserError("the log has no rows")

    def _with_ids(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if not (batch["user"].null_count or batch["item"].null_count):
            return batch
        user, item = (batch[name].is_valid().to_numpy(zero_copy_only=False) for name in ("user", "item"))
        kept = batch.filter(pa.array(user & item))
        self.counts["missing_ids"] += batch.num_rows - kept.num_rows
        return kept

    def _count_bad_values(self, records: np.ndarray) -> None:
        for name in self.labeling.columns:
            column = records[name]
            np.copyto(column, np.nan, where=~np.isfinite(column))
            if name == "duration":
                self.counts["bad_durations"] += int(len(column) - np.count_nonzero(column > 0))
            elif name == "play_time":
                self.counts["bad_play_times"] += int(len(column) - np.count_nonzero(column >= 0))
            elif name == "rating":
                self.counts["missing_ratings"] += int(np.count_nonzero(np.isnan(column)))

    def _bucket(self, records: np.ndarray) -> np.ndarray:
        user, item = records["user"], records["item"]
        if self.log.universe():
            pair = user.astype(np.uint64) << np.uint64(32) | item.astype(np.uint64)
        else:
            pair = self.user_ids.words(user) * np.uint64(3) + self.item_ids.words(item)
        words = hashing.mix(hashing.key(self.cut.seed, "bucket"), pair)
        return (words % np.uint64(BUCKETS)).astype(np.uint8)

    def _finish_ids(self) -> None:
        if universe := self.log.universe():
            self.users, self.items = universe
            self.final_user, self.final_item = (np.arange(size, dtype=np.int32) for size in universe)
            tables = [id_table(pa.array(np.arange(size))) for size in universe]
        else:
            self.final_user, user_table = self.user_ids.finish()
            self.final_item, item_table = self.item_ids.finish()
            self.users, self.items = len(self.final_user), len(self.final_item)
            tables = [user_table, item_table]
        if not (self.users and self.items):
            raise UserError("no row of the log has both a user and an item")
        for name, table in zip(("users", "items"), tables, strict=True):
            self.writer.add_table(name, f"{name}.parquet", table)

    # Between the passes: what must be known about all rows before the first is labeled or split.

    def _quartiles(self) -> tuple[float, float]:
        def played() -> Iterator[np.ndarray]:
            return (chunk[chunk >= 0] for chunk in self.spill.chunks("play_time"))

        rows = sum(len(chunk) for chunk in played())
        if not rows:
            raise UserError("rule play_time: no row has a play time of zero or more")
        lower, upper = order_statistics(played, [(rows - 1) // 4, (3 * (rows - 1) + 3) // 4])
        return float(lower), float(upper)

    def _find_time_cuts(self) -> tuple[int, int]:
        times = self.writer.folder / "times"
        with open(times, "wb") as file:
            for rows in self._clean():
                file.write(rows["time"][rows["label"] != UNCLEAR_LABEL].astype(np.int64).data)
        count = times.stat().st_size // 8
        if not count:
            times.unlink()
            raise UserError(_no_labels(self.labeling))
        column = np.memmap(times, np.int64, "r")

        def chunks() -> Iterator[np.ndarray]:
            return (np.asarray(column[start : start + (1 << 20)]) for start in range(0, count, 1 << 20))

        train, valid, _ = self.cut.fractions
        ranks = [max(round(count * share) - 1, 0) for share in (train, train + valid)]
        cuts = order_statistics(chunks, ranks)
        times.unlink()
        return int(cuts[0]), int(cuts[1])

    # Pass 2: the buckets.

    def _clean(self, counts: Counter[str] | None = None) -> Iterator[np.ndarray]:
        """The rows of each bucket with final ids, one per pair, labeled, in random order."""
        for bucket, records in enumerate(self.spill.buckets()):
            rows = np.empty(len(records), np.dtype([*records.dtype.descr, ("label", np.int8)]))
            for name in records.dtype.names:  # type: ignore[union-attr]
                rows[name] = records[name]
            rows["user"], rows["item"] = self.final_user[records["user"]], self.final_item[records["item"]]
            rows = self._one_per_pair(rows, Counter() if counts is None else counts)
            rows["label"] = self.labeling.label({name: rows[name] for name in self.labeling.columns})
            yield rows[hashing.permutation(hashing.key(self.cut.seed, "rows", bucket), len(rows))]

    def _one_per_pair(self, rows: np.ndarray, counts: Counter[str]) -> np.ndarray:
        pair = rows["user"].astype(np.int64) * self.items + rows["item"]
        # Sorted by pair, the rows stand in an order that the log's own does not change; within a pair by time.
        order = np.lexsort((rows["time"], pair)) if self.log.has_time else np.argsort(pair, kind="stable")
        rows, pair = rows[order], pair[order]
        repeated = pair[1:] == pair[:-1]
        if not repeated.any():
            return rows
        same = repeated.copy()
        for name in self.spill.dtype.names[2:]:  # type: ignore[index]
            column = rows[name]
            same &= (column[1:] == column[:-1]) | ((column[1:] != column[1:]) & (column[:-1] != column[:-1]))
        counts["exact_duplicates"] += int(np.count_nonzero(same))
        counts["repeated_pairs"] += int(np.count_nonzero(repeated & ~same))
        keep = np.ones(len(rows), bool)
        if self.cut.duplicates == "last":
            keep[:-1] = ~repeated
        else:
            keep[1:] = ~repeated
        return rows[keep]

    def _write_rows(self) -> None:
        split_shares = Shares(self.cut.fractions)
        label_shares = Shares([self.cut.label_fraction, 1 - self.cut.label_fraction])
        training_shares = Shares([1 - self.cut.training_test_fraction, self.cut.training_test_fraction])
        written = 0
        for rows in self._clean(self.counts):
            unclear = rows[rows["label"] == UNCLEAR_LABEL]
            if self._time_cuts is not None:
                later = unclear["time"] > self._time_cuts[0]
                self.counts["unclear_after_training"] += int(np.count_nonzero(later))
                unclear = unclear[~later]
            truth = unclear["truth"] if self.log.has_truth else np.full(len(unclear), np.nan, np.float32)
            self._add_unclear(unclear, truth)
            labeled = rows[rows["label"] != UNCLEAR_LABEL]
            split = self._split(labeled, split_shares)
            self._add_labeled("valid", labeled[split == VALID])
            self._add_labeled("test", labeled[split == TEST])
            train = labeled[split == TRAIN]
            hidden = label_shares.cut(len(train)) == 1
            self.counts["hidden_labels"] += int(np.count_nonzero(hidden))
            self._add_unclear(train[hidden], train[hidden]["label"].astype(np.float32))
            train = train[~hidden]
            part = training_shares.cut(len(train))
            self._add_labeled("train", train[part == 0])
            self._add_labeled("training_test", train[part == 1])
            written += len(rows)
            self.progress("writing", written)

    def _split(self, labeled: np.ndarray, shares: Shares) -> np.ndarray:
        if self._time_cuts is not None:
            return by_time(labeled["time"], *self._time_cuts)
        if self.given is not None:
            user, item = (labeled[name].astype(np.uint64) for name in ("user", "item"))
            return self.given.split(user * np.uint64(self.items) + item)
        return shares.cut(len(labeled))

    def _add_labeled(self, split: str, rows: np.ndarray) -> None:
        positives = int(np.count_nonzero(rows["label"] == 1))
        self.counts[f"{split} positives"] += positives
        self.counts[f"{split} negatives"] += len(rows) - positives
        columns = {name: np.ascontiguousarray(rows[name]) for name in ("user", "item", "label")}
        self.writer.add(split, columns)

    def _add_unclear(self, rows: np.ndarray, truth: np.ndarray) -> None:
        columns = {name: np.ascontiguousarray(rows[name]) for name in ("user", "item")}
        self.writer.add("unclear", {**columns, "truth": np.ascontiguousarray(truth)})

    def _finish(self) -> dict[str, Any]:
        if self.given is not None:
            self.given.check_all_found()
        classes = {
            split: {kind: self.counts.pop(f"{split} {kind}") for kind in ("positives", "negatives")}
            for split in LABELED
        }
        _check_classes(classes, self.labeling)
        positives, negatives = (sum(c[kind] for c in classes.values()) for kind in ("positives", "negatives"))
        summary = {
            "users": self.users,
            "items": self.items,
            "positives": positives,
            "negatives": negatives,
            "unclear": self.writer.rows["unclear"],
            "density": (positives + negatives) / (self.users * self.items),
        }
        return self.writer.finish(
            {
                "rules": RULES,
                "users": self.users,
                "items": self.items,
                "summary": summary,
                "classes": classes,
                "counts": {name: self.counts[name] for name in COUNTS},
                "labeling": asdict(self.labeling),
                "cut": {**asdict(self.cut), "time_cuts": self._time_cuts},
                "source": self.log.describe(),
            }
        )


def _check_classes(classes: dict[str, dict[str, int]], labeling: Labeling) -> None:
    if not sum(sum(counts.values()) for counts in classes.values()):
        raise UserError(_no_labels(labeling))
    for split in ("train", "valid", "test"):
        for kind, count in classes[split].items():
            if not count:
                raise UserError(
                    f"{split} has no {kind} under rule {'+'.join(labeling.rules)} "
                    f"({sum(classes[split].values())} rows of one class): nothing to learn or to rank; "
                    "choose another rule, other thresholds or other fractions"
                )


def _no_labels(labeling: Labeling) -> str:
    return f"no row is clear under rule {'+'.join(labeling.rules)}; nothing could be trained or tested"
