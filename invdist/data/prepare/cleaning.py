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

from invdist.data.prepare.ids import IdMap, id_table
from invdist.data.prepare.labeling import Labeling
from invdist.data.prepare.options import Options
from invdist.data.prepare.quantiles import order_statistics
from invdist.data.prepare.raw_log import RawLog
from invdist.data.prepare.row_rules import RowRules, pair_of_indices, pair_of_words, quartile_ranks
from invdist.data.prepare.since_until import TooLittle, no_rows
from invdist.data.prepare.spill import Spill

Progress = Callable[[str, int], None]
"""Called with the stage and how many rows it has done."""


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
        self.rules = RowRules(log, labeling, options)
        self._spill = Spill(folder / "spill", self.rules.dtype)

    def remove(self) -> None:
        """Deletes the buckets."""
        self._spill.remove()

    def read(self) -> None:
        """Reads the log, once."""
        rows = 0
        for batch in self.log.batches():
            rows += batch.num_rows
            batch = self.rules.with_ids(batch, self.counts)
            records = self.rules.records(batch, self.counts)
            if self.log.universe():
                records["user"], records["item"] = batch["user"].to_numpy(), batch["item"].to_numpy()
                pair = pair_of_indices(records["user"], records["item"])
            else:
                records["user"] = self.user_ids.provisional(batch["user"])
                records["item"] = self.item_ids.provisional(batch["item"])
                pair = pair_of_words(self.user_ids.words(records["user"]), self.item_ids.words(records["item"]))
            self._spill.append(records, self.rules.bucket(pair))
            self.progress("reading", rows)
        self._spill.close()
        self.counts["log_rows"] = rows
        if not rows:
            raise no_rows(self.log)
        self._finish_ids()
        self.quartiles = self._quartiles() if "play_time" in self.labeling.rules else None
        if self.labeling.quartiles is None:  # otherwise they are those of the first day
            self.labeling = self.rules.labeling = replace(self.labeling, quartiles=self.quartiles)
        self.finish_rates = self.rules.finish_rates(self._spill.buckets())

    def find_users(self, raw: list[str]) -> np.ndarray:
        """Final indices (int64) of users written as text, -1 where the log has none."""
        return _final(self.user_ids.known_text(raw), self.final_user)

    def find_items(self, raw: list[str]) -> np.ndarray:
        """Final indices (int64) of items written as text, -1 where the log has none."""
        return _final(self.item_ids.known_text(raw), self.final_item)

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
            raise TooLittle("no row of the log has both a user and an item")
        self.id_tables: dict[str, pa.Table] = dict(zip(("users", "items"), tables, strict=True))

    def _quartiles(self) -> tuple[float, float]:
        def played() -> Iterator[np.ndarray]:
            return (chunk[chunk >= 0] for chunk in self._spill.chunks("play_time"))

        rows = sum(len(chunk) for chunk in played())
        if not rows:
            raise TooLittle("rule play_time: no row has a play time of zero or more")
        lower, upper = order_statistics(played, quartile_ranks(rows))
        return float(lower), float(upper)

    def buckets(self, counts: Counter[str] | None = None) -> Iterator[np.ndarray]:
        """The clean rows of each bucket in random order, `label` instead of signals; duplicates go to `counts`."""
        for bucket, records in enumerate(self._spill.buckets()):
            records["user"], records["item"] = self.final_user[records["user"]], self.final_item[records["item"]]
            yield self.rules.clean(bucket, records, self.items, Counter() if counts is None else counts)


def _final(provisional: np.ndarray, final: np.ndarray) -> np.ndarray:
    return np.where(provisional < 0, -1, final[provisional])
