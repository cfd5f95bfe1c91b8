"""What is done to the rows of a log, as functions of the rows alone: in one process or in many, the same comes out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from invdist.data import hashing
from invdist.data.prepare.labeling import Labeling, finish_rate
from invdist.data.prepare.options import Options
from invdist.data.prepare.raw_log import LABELS, RawLog
from invdist.data.prepare.spill import BUCKETS

_QUANTILES = {"min": 0.0, "10%": 0.1, "25%": 0.25, "50%": 0.5, "75%": 0.75, "90%": 0.9, "max": 1.0}
_SAMPLE_ROWS = 1 << 20


class RowRules:
    """The rules for the rows of a log. `dtype` is that of records: `user`, `item` and what was observed."""

    def __init__(self, log: RawLog, labeling: Labeling, options: Options) -> None:
        self.labeling, self.options = labeling, options
        self.when = ["time"] * log.has_time + ["day"] * log.has_day
        self.has_truth = log.has_truth
        fields = [("user", np.int32), ("item", np.int32), *((name, np.float64) for name in labeling.columns)]
        fields += [(name, np.int64) for name in self.when] + [("truth", np.float32)] * log.has_truth
        self.dtype = np.dtype(fields)

    @property
    def observed(self) -> tuple[str, ...]:
        """The fields of a record without user and item."""
        return self.dtype.names[2:]  # type: ignore[index]

    def with_ids(self, batch: pa.RecordBatch, counts: Counter[str]) -> pa.RecordBatch:
        """The rows that have a user and an item."""
        if not (batch["user"].null_count or batch["item"].null_count):
            return batch
        user, item = (batch[name].is_valid().to_numpy(zero_copy_only=False) for name in ("user", "item"))
        kept = batch.filter(pa.array(user & item))
        counts["missing_ids"] += batch.num_rows - kept.num_rows
        return kept

    def records(self, batch: pa.RecordBatch, counts: Counter[str]) -> np.ndarray:
        """What was observed in the rows of a batch; `user` and `item` are left for the caller to fill in."""
        records = np.empty(batch.num_rows, self.dtype)
        for name in self.observed:
            records[name] = batch[name].to_numpy(zero_copy_only=False)
        for name in self.labeling.columns:
            column = records[name]
            np.copyto(column, np.nan, where=~np.isfinite(column))
            if name == "duration":
                counts["bad_durations"] += int(len(column) - np.count_nonzero(column > 0))
            elif name == "play_time":
                counts["bad_play_times"] += int(len(column) - np.count_nonzero(column >= 0))
            elif name == "rating":
                counts["missing_ratings"] += int(np.count_nonzero(np.isnan(column)))
            elif name in LABELS:
                counts["missing_labels"] += int(np.count_nonzero(np.isnan(column)))
        return records

    def bucket(self, pair: np.ndarray) -> np.ndarray:
        """The bucket (uint8) of pairs, each given as one word (uint64) by `pair_of_words` or `pair_of_indices`."""
        words = hashing.mix(hashing.key(self.options.seed, "bucket"), pair)
        return (words % np.uint64(BUCKETS)).astype(np.uint8)

    def clean(self, bucket: int, records: np.ndarray, items: int, counts: Counter[str]) -> np.ndarray:
        """The clean rows of a bucket in random order: one per pair, `label` instead of signals."""
        signals = self.labeling.columns
        kept = [field for field in self.dtype.descr if field[0] not in signals]
        records = self._one_per_pair(records, items, counts)
        rows = np.empty(len(records), np.dtype([*kept, ("label", np.int8)]))
        for field in kept:
            rows[field[0]] = records[field[0]]
        rows["label"] = self.labeling.label({name: records[name] for name in signals})
        return rows[hashing.permutation(hashing.key(self.options.seed, "rows", bucket), len(rows))]

    def _one_per_pair(self, rows: np.ndarray, items: int, counts: Counter[str]) -> np.ndarray:
        pair = rows["user"].astype(np.int64) * items + rows["item"]
        # Sorted by pair, rows have an order that does not depend on the log's; within a pair by day and time.
        order = np.lexsort((*(rows[name] for name in self.when), pair))
        rows, pair = rows[order], pair[order]
        repeated = pair[1:] == pair[:-1]
        if not repeated.any():
            return rows
        same = repeated.copy()
        for name in self.observed:
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

    def finish_rates(self, buckets: Iterable[np.ndarray]) -> dict[str, float] | None:
        """Quantiles of the finish rates of a million random rows, or of all if there are fewer; None without any."""
        if not {"play_time", "duration"} <= set(self.labeling.columns):
            return None
        rates, rows = [], 0
        for records in buckets:
            rate = finish_rate(records["play_time"], records["duration"])
            rates.append(rate[np.isfinite(rate)])
            rows += len(rates[-1])
            if rows >= _SAMPLE_ROWS:
                break
        if not rows:
            return None
        values = np.quantile(np.concatenate(rates), list(_QUANTILES.values()), method="lower")
        return dict(zip(_QUANTILES, values.tolist(), strict=True))


def quartile_ranks(rows: int) -> list[int]:
    """The ranks of the lower and upper quartile of so many values."""
    return [(rows - 1) // 4, (3 * (rows - 1) + 3) // 4]


def pair_of_indices(user: np.ndarray, item: np.ndarray) -> np.ndarray:
    """Pairs of indices that are the ids themselves, as words (uint64)."""
    return user.astype(np.uint64) << np.uint64(32) | item.astype(np.uint64)


def pair_of_words(user: np.ndarray, item: np.ndarray) -> np.ndarray:
    """Pairs of mapped ids as words (uint64), of the words of their ids: the order of the log does not matter."""
    return user * np.uint64(3) + item


def with_noise(rows: np.ndarray, share: float, seed: int) -> np.ndarray:
    """The rows, the labels of a share of them inverted: which ones is a function of pair and seed."""
    if not share:
        return rows
    words = hashing.mix(hashing.key("label noise", seed), pair_of_indices(rows["user"], rows["item"]))
    noisy = rows.copy()
    noisy["label"] ^= hashing.uniform(words) < share
    return noisy
