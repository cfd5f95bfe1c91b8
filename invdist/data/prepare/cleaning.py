"""From a raw log to clean rows in bounded memory: dense ids, one row per pair, labeled, in random order.

One pass over the log maps ids and puts every row into one of 128 buckets on disk, by a seeded hash of its (user, item)
pair. So the duplicates of a pair are in one bucket, and buckets read in turn, each permuted, are a random order of all
rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from invdist.data import hashing
from invdist.data.prepare.ids import IdMap, id_table
from invdist.data.prepare.labeling import Labeling, finish_rate
from invdist.data.prepare.options import Options
from invdist.data.prepare.quantiles import order_statistics
from invdist.data.prepare.raw_log import LABELS, RawLog
from invdist.data.prepare.spill import BUCKETS, Spill
from invdist.runtime.errors import UserError

Progress = Callable[[str, int], None]
"""Called with the stage and how many rows it has done."""

_QUANTILES = {"min": 0.0, "10%": 0.1, "25%": 0.25, "50%": 0.5, "75%": 0.75, "90%": 0.9, "max": 1.0}
_SAMPLE_ROWS = 1 << 20


class CleanRows:
    """The clean rows of a log. Call `read` once; then iterate over `buckets`, and `remove` what is on disk.

    Known after `read`: `users` and `items` (how many), `user_ids`, `item_ids` with the `final_user`, `final_item` of
    their provisional indices, `id_tables`, `labeling` with its quartiles, the log's own `quartiles`, `finish_rates`,
    and `counts`.
    """

    def __init__(self, log: RawLog, labeling: Labeling, options: Options, folder: Path, progress: Progress) -> None:
        self.log, self.labeling, self.options, self.progress = log, labeling, options, progress
        self.counts: Counter[str] = Counter()
        self.user_ids, self.item_ids = IdMap("user"), IdMap("item")
        fields = [("user", np.int32), ("item", np.int32), *((name, np.float64) for name in labeling.columns)]
        fields += [("time", np.int64)] * log.has_time + [("day", np.int64)] * log.has_day
        fields += [("truth", np.float32)] * log.has_truth
        self._spill = Spill(folder / "spill", np.dtype(fields))

    def remove(self) -> None:
        """Deletes the buckets."""
        self._spill.remove()

    def read(self) -> None:
        """Reads the log, once."""
        rows = 0
        for batch in self.log.batches():
            rows += batch.num_rows
            batch = self._with_ids(batch)
            records = np.empty(batch.num_rows, self._spill.dtype)
            if self.log.universe():
                records["user"], records["item"] = batch["user"].to_numpy(), batch["item"].to_numpy()
            else:
                records["user"] = self.user_ids.provisional(batch["user"])
                records["item"] = self.item_ids.provisional(batch["item"])
            for name in self._spill.dtype.names[2:]:  # type: ignore[index]
                records[name] = batch[name].to_numpy(zero_copy_only=False)
            self._count_bad_values(records)
            self._spill.append(records, self._bucket(records))
            self.progress("reading", rows)
        self._spill.close()
        self.counts["log_rows"] = rows
        if not rows:
            raise UserError("the log has no rows")
        self._finish_ids()
        self.quartiles = self._quartiles() if "play_time" in self.labeling.rules else None
        if self.labeling.quartiles is None:  # otherwise they are those of the first day
            self.labeling = replace(self.labeling, quartiles=self.quartiles)
        self.finish_rates = self._finish_rates()

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
            elif name in LABELS:
                self.counts["missing_labels"] += int(np.count_nonzero(np.isnan(column)))

    def _bucket(self, records: np.ndarray) -> np.ndarray:
        user, item = records["user"], records["item"]
        if self.log.universe():
            pair = user.astype(np.uint64) << np.uint64(32) | item.astype(np.uint64)
        else:
            pair = self.user_ids.words(user) * np.uint64(3) + self.item_ids.words(item)
        words = hashing.mix(hashing.key(self.options.seed, "bucket"), pair)
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
        self.id_tables: dict[str, pa.Table] = dict(zip(("users", "items"), tables, strict=True))

    def _quartiles(self) -> tuple[float, float]:
        def played() -> Iterator[np.ndarray]:
            return (chunk[chunk >= 0] for chunk in self._spill.chunks("play_time"))

        rows = sum(len(chunk) for chunk in played())
        if not rows:
            raise UserError("rule play_time: no row has a play time of zero or more")
        lower, upper = order_statistics(played, [(rows - 1) // 4, (3 * (rows - 1) + 3) // 4])
        return float(lower), float(upper)

    def _finish_rates(self) -> dict[str, float] | None:
        """Quantiles of the finish rates of a million random rows, or of all if there are fewer; None without any."""
        if not {"play_time", "duration"} <= set(self.labeling.columns):
            return None
        rates, rows = [], 0
        for records in self._spill.buckets():
            rate = finish_rate(records["play_time"], records["duration"])
            rates.append(rate[np.isfinite(rate)])
            rows += len(rates[-1])
            if rows >= _SAMPLE_ROWS:
                break
        if not rows:
            return None
        values = np.quantile(np.concatenate(rates), list(_QUANTILES.values()), method="lower")
        return dict(zip(_QUANTILES, values.tolist(), strict=True))

    def buckets(self, counts: Counter[str] | None = None) -> Iterator[np.ndarray]:
        """The clean rows of each bucket in random order, `label` instead of signals; duplicates go to `counts`."""
        signals = self.labeling.columns
        kept = [field for field in self._spill.dtype.descr if field[0] not in signals]
        for bucket, records in enumerate(self._spill.buckets()):
            records["user"], records["item"] = self.final_user[records["user"]], self.final_item[records["item"]]
            records = self._one_per_pair(records, Counter() if counts is None else counts)
            rows = np.empty(len(records), np.dtype([*kept, ("label", np.int8)]))
            for field in kept:
                rows[field[0]] = records[field[0]]
            rows["label"] = self.labeling.label({name: records[name] for name in signals})
            yield rows[hashing.permutation(hashing.key(self.options.seed, "rows", bucket), len(rows))]

    def _one_per_pair(self, rows: np.ndarray, counts: Counter[str]) -> np.ndarray:
        pair = rows["user"].astype(np.int64) * self.items + rows["item"]
        # Sorted by pair, rows have an order that does not depend on the log's; within a pair by day and time.
        when = ["time"] * self.log.has_time + ["day"] * self.log.has_day
        order = np.lexsort((*(rows[name] for name in when), pair))
        rows, pair = rows[order], pair[order]
        repeated = pair[1:] == pair[:-1]
        if not repeated.any():
            return rows
        same = repeated.copy()
        for name in self._spill.dtype.names[2:]:  # type: ignore[index]
            column = rows[name]
            same &= (column[1:] == column[:-1]) | ((column[1:] != column[1:]) & (column[:-1] != column[:-1]))
        counts["exact_duplicates"] += int(np.count_nonzero(same))
        counts["repeated_pairs"] += int(np.count_nonzero(repeated & ~same))
        keep = np.ones(len(rows), bool)
        if self.options.duplicates == "last":
            keep[:-1] = ~repeated
        else:
            keep[1:] = ~repeated
        return rows[keep]
