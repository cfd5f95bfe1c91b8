"""A day's data set onto that of the day before: known ids keep their index, and older rows are carried along.

The log of the day is prepared by itself first, with the labels of the first day. Then its rows and those of the older
data set, with ids joined by their raw values, are put into buckets on disk by pair: so a pair that both have is found,
and buckets read in turn, each permuted, are a random order of all rows. Memory grows with ids, not with rows.

A *day* is one data set of the chain, whatever time its log covers: the first is day 0. Every row and every id has the
day that it was seen on last (columns `day` of shards and `last_seen` of the id tables).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute

from invdist.data import hashing
from invdist.data.dataset import Dataset
from invdist.data.prepare.ids import id_table
from invdist.data.prepare.labeling import Labeling
from invdist.data.prepare.options import Options
from invdist.data.prepare.row_rules import pair_of_indices
from invdist.data.prepare.spill import BUCKETS, Spill
from invdist.data.prepare.splitting import Shares
from invdist.data.prepare.writer import DatasetWriter
from invdist.data.schema import LABELED_SPLITS, SPLITS, TRAINING_LABELED, UNCLEAR_LABEL
from invdist.runtime.errors import UserError

pc: Any = pyarrow.compute  # its functions are generated at import, unseen by type checkers

GONE = -1
"""The index of an id that was dropped."""
Entity = Literal["users", "items"]
ENTITIES: tuple[Entity, Entity] = ("users", "items")
ROW = np.dtype(
    [
        ("user", "i4"),
        ("item", "i4"),
        ("label", "i1"),
        ("split", "i1"),
        ("day", "i4"),
        ("truth", "f4"),
        ("today", "?"),
        ("replayed", "i1"),
    ]
)


_ROWS_AT_ONCE = 1 << 20
"""Rows of a shard whose indices are looked up together: where they are in files, most of these are read each time."""
_UNCLEAR = SPLITS.index("unclear")
_NOT_LEARNED = (SPLITS.index("valid"), SPLITS.index("test"))


def fixed_labeling(asked: Labeling, base: Dataset) -> Labeling:
    """The rules of the first day with the quartiles measured then; `UserError` if others are asked for."""
    recorded = base.manifest["labeling"]
    wanted = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(asked).items()}
    changed = [name for name, value in wanted.items() if name != "quartiles" and value != recorded.get(name)]
    if changed:
        raise UserError(
            f"labels are those of the first day: {base.path} has "
            f"{', '.join(f'{name}={recorded.get(name)}' for name in changed)}, and this call asks for "
            f"{', '.join(f'{name}={wanted[name]}' for name in changed)}; give the options of the first day"
        )
    quartiles = recorded.get("quartiles")
    return dataclasses.replace(asked, quartiles=tuple(quartiles) if quartiles else None)


def day_of(dataset: Dataset) -> int:
    """The number of a data set in its chain; 0 for one that was not prepared onto another."""
    return dataset.manifest.get("day", 0)


def type_of_ids(base: Dataset, today: Dataset, entity: Entity) -> pa.DataType:
    """The type of the base's ids, which those of the day are cast to; `UserError` if they cannot be."""
    kind = base.raw_id_type(entity)
    if pa.types.is_integer(kind) and today.raw_id_type(entity) != kind:
        raise UserError(
            f"{entity} of the log are text, those of {base.path} whole numbers; an id keeps its type: prepare "
            "the first day again with id_type=string"
        )
    return kind


class Indices(Protocol):
    """The new index (int32) of each older one; `GONE` if it was dropped."""

    def __getitem__(self, rows: np.ndarray, /) -> np.ndarray: ...

    def __array__(self) -> np.ndarray: ...


class NewIds(Protocol):
    """Users or items after the day. `before` has the index of each id of the base, `today` that of each of the day."""

    @property
    def before(self) -> Indices: ...
    @property
    def today(self) -> Indices: ...

    new: int
    dropped: int

    def __len__(self) -> int: ...


class Joined:
    """The ids of users or items after the day: those of `base` in their order, then new ones in that of the raw ids.

    `table` is the id table; for the rest see `NewIds`.
    """

    def __init__(self, base: Dataset, today: Dataset, entity: Entity, drop_unseen: int | None) -> None:
        day, known = day_of(base) + 1, base.raw_ids(entity)
        raw = today.raw_ids(entity).cast(type_of_ids(base, today, entity))
        found = pc.fill_null(pc.index_in(raw, value_set=known), -1).to_numpy(zero_copy_only=False)
        last_seen = np.concatenate([last_seen_of(base, entity), np.full(int(np.sum(found < 0)), day, np.int32)])
        last_seen[found[found >= 0]] = day
        new = pa.array(raw.filter(pa.array(found < 0)))
        new = new.take(pc.array_sort_indices(new))
        everyone = pa.concat_arrays([known, new])
        kept = np.ones(len(everyone), bool) if drop_unseen is None else day - last_seen < drop_unseen
        index = np.where(kept, np.cumsum(kept) - 1, GONE).astype(np.int32)
        self.before = index[: len(known)]
        self.today = index[pc.index_in(raw, value_set=everyone).to_numpy(zero_copy_only=False)]
        self.new, self.dropped = len(new), int(np.count_nonzero(~kept))
        table = id_table(everyone.filter(pa.array(kept)))
        self.table = table.append_column("last_seen", pa.array(last_seen[kept], pa.int32()))

    def __len__(self) -> int:
        return self.table.num_rows


def joined_ids(base: Dataset, today: Dataset, drop_unseen: int | None) -> dict[Entity, Joined]:
    """Users and items after the day, joined in memory."""
    return {entity: Joined(base, today, entity, drop_unseen) for entity in ENTITIES}


class GrowthRules:
    """What becomes of the rows of both data sets, as functions of the rows alone: in one process or in many."""

    def __init__(self, day: int, options: Options, ids: Mapping[Entity, NewIds]) -> None:
        self.day, self.options = day, options
        self._before, self._today = ([getattr(joined, when) for joined in ids.values()] for when in ("before", "today"))

    def read(self, dataset: Dataset, today: bool, split: str, shard: int, counts: Counter[str]) -> Iterator[np.ndarray]:
        """The rows of a shard by the new ids; of the base those of the days to keep, with ids that are left."""
        first = 0 if self.options.keep is None else self.day - self.options.keep
        user, item = self._today if today else self._before
        dated = ["day"] if day_of(dataset) else []
        labels = ["label"] if split in LABELED_SPLITS or dataset.manifest.get("set_aside") else []
        truth = dataset.scan("truth", None, _ROWS_AT_ONCE, shard) if split == "unclear" else None
        for batch in dataset.scan(split, ["user", "item", *labels, *dated], _ROWS_AT_ONCE, shard):
            rows = np.zeros(len(batch), ROW)
            rows["user"], rows["item"] = user[batch["user"].to_numpy()], item[batch["item"].to_numpy()]
            rows["label"] = batch["label"].to_numpy() if labels else UNCLEAR_LABEL
            rows["split"], rows["today"] = SPLITS.index(split), today
            rows["day"] = self.day if today else batch["day"].to_numpy() if dated else 0
            rows["truth"] = np.nan if truth is None else next(truth)["truth"].to_numpy()
            left, old = (rows["user"] != GONE) & (rows["item"] != GONE), rows["day"] < first
            if not today:
                self._set_aside(rows, old)
            kept = left & ~old if self.options.older == "drop" else left
            counts["dropped_rows"] += int(np.count_nonzero(~left))
            counts["rows_outside_window"] += int(np.count_nonzero(left & ~kept))
            yield rows[kept]

    def _set_aside(self, rows: np.ndarray, old: np.ndarray) -> None:
        """Makes old labels unclear that a model has learned from, but for a share that it learns from again.

        A label that only validated or tested a model has taught it nothing yet: it trains the next one.
        """
        labeled, drawn = rows["label"] != UNCLEAR_LABEL, hashing.uniform(self._words(rows, "replay", self.day))
        learned = old & labeled & ~np.isin(rows["split"], _NOT_LEARNED)
        aside = learned & (drawn >= self.options.replay)
        rows["replayed"] = learned & ~aside
        rows["split"][labeled & ~aside & (rows["split"] == _UNCLEAR)] = _NOT_LEARNED[0]
        rows["truth"][aside], rows["split"][aside] = rows["label"][aside], _UNCLEAR

    def bucket(self, rows: np.ndarray) -> np.ndarray:
        """The bucket (uint8) of each row, by its pair."""
        return (self._words(rows, "onto") % np.uint64(BUCKETS)).astype(np.uint8)

    def _words(self, rows: np.ndarray, *purpose: int | str) -> np.ndarray:
        """A random word (uint64) for each pair."""
        pairs = pair_of_indices(rows["user"], rows["item"])
        return hashing.mix(hashing.key(self.options.seed, *purpose), pairs)

    def clean(self, bucket: int, rows: np.ndarray, counts: Counter[str]) -> np.ndarray:
        """One row per pair of a bucket, in random order."""
        rows = rows[np.lexsort((rows["today"], rows["item"], rows["user"]))]
        again = (rows["user"][1:] == rows["user"][:-1]) & (rows["item"][1:] == rows["item"][:-1])
        keep = np.ones(len(rows), bool)
        if self.options.duplicates == "last":
            keep[:-1] = ~again
        else:
            keep[1:] = ~again
        counts["pairs_seen_before"] += int(np.count_nonzero(again))
        rows = rows[keep]
        counts["carried_rows"] += int(np.count_nonzero(~rows["today"]))
        return rows[hashing.permutation(hashing.key(self.options.seed, "onto", bucket), len(rows))]

    def past(self, rows: np.ndarray) -> np.ndarray:
        """Which rows (bool) validated or tested a model of an earlier day: something to learn from by now."""
        return ~rows["today"] & np.isin(rows["split"], _NOT_LEARNED)

    def shares(self) -> Shares:
        """How rows of the past are cut into train and training_test, bucket by bucket."""
        training_test = self.options.training_test_fraction
        return Shares([1 - training_test, training_test])


class Growth:
    """A day's data set `today`, with the rows of `base` that are carried along, by the new `ids`."""

    def __init__(self, base: Dataset, today: Dataset, options: Options, ids: Mapping[Entity, NewIds]) -> None:
        self.base, self.today, self.options, self.ids = base, today, options, ids
        self.day = day_of(base) + 1
        for entity, joined in ids.items():
            if not len(joined):
                raise UserError(f"drop_unseen={options.drop_unseen} leaves no {entity}")
        self.rules = GrowthRules(self.day, options, ids)
        self.counts: Counter[str] = Counter()

    def shards(self) -> Iterator[tuple[bool, str, int]]:
        """(of today, split, number) of all shards of both."""
        for dataset, today in ((self.base, False), (self.today, True)):
            for split in SPLITS:
                yield from ((today, split, number) for number in range(len(dataset.shards(split))))

    def write(self, writer: DatasetWriter) -> dict[str, Any]:
        """Writes all but the id tables; gives what the manifest of the day says otherwise than that of its log."""
        spill = Spill(writer.folder / "growing", ROW)
        try:
            for today, split, number in self.shards():
                dataset = self.today if today else self.base
                for rows in self.rules.read(dataset, today, split, number, self.counts):
                    spill.append(rows, self.rules.bucket(rows))
            spill.close()
            shares = self.rules.shares()
            for bucket, rows in enumerate(spill.buckets()):
                rows = self.rules.clean(bucket, rows, self.counts)
                past = self.rules.past(rows)
                rows["split"][past] = shares.cut(int(np.count_nonzero(past)))
                for number, split in enumerate(SPLITS):
                    self._add(writer, split, rows[rows["split"] == number])
        finally:
            spill.remove()
        for table in self.latent():
            writer.add_table(*table)
        return self.manifest(writer.rows["unclear"])

    def _add(self, writer: DatasetWriter, split: str, rows: np.ndarray) -> None:
        writer.add(split, {name: np.ascontiguousarray(rows[name]) for name in columns_of(split)})
        if split in LABELED_SPLITS:
            self.counts[f"{split} positives"] += int(np.count_nonzero(rows["label"] == 1))
            self.counts[f"{split} negatives"] += int(np.count_nonzero(rows["label"] == 0))

    def latent(self) -> Iterator[tuple[str, str, pa.Table]]:
        """The truth behind a synthetic feed: that of the day, and the last one known of who was not seen on it."""
        for entity, joined in self.ids.items():
            name = f"latent_{entity}"
            if not (name in self.today.manifest["files"] and name in self.base.manifest["files"]):
                continue
            tables = [d.parquet(d.manifest["files"][name]["file"]).read() for d in (self.base, self.today)]
            source = np.zeros(len(joined), np.int64)
            for at, indices in ((0, joined.before), (tables[0].num_rows, joined.today)):
                index = np.asarray(indices)
                source[index[index != GONE]] = at + np.flatnonzero(index != GONE)
            table = pa.concat_tables(tables).take(pa.array(source))
            yield name, f"latent/{entity}.parquet", table.combine_chunks()

    def manifest(self, unclear: int) -> dict[str, Any]:
        """What the manifest of the day says otherwise than that of its log; `unclear` rows were written."""
        users, items = (len(joined) for joined in self.ids.values())
        classes = {
            split: {kind: self.counts.pop(f"{split} {kind}") for kind in ("positives", "negatives")}
            for split in LABELED_SPLITS
        }
        positives, negatives = (sum(c[kind] for c in classes.values()) for kind in ("positives", "negatives"))
        base, today = self.base.manifest, self.today.manifest
        growth = {
            **{
                f"{kind}_{entity}": getattr(self.ids[entity], kind)
                for entity in self.ids
                for kind in ("new", "dropped")
            },
            **{name: self.counts[name] for name in _COUNTS},
        }
        return {
            **{name: today[name] for name in ("rules", "counts", "finish_rates", "cut", "source", "labeling")},
            "users": users,
            "items": items,
            "summary": {
                "users": users,
                "items": items,
                "positives": positives,
                "negatives": negatives,
                "unclear": unclear,
                "density": (positives + negatives) / (users * items),
            },
            "classes": classes,
            "day": self.day,
            "keep": self.options.keep,
            "drop_unseen": self.options.drop_unseen,
            "set_aside": True,
            **({"replay": self.options.replay} if self.options.older == "unclear" else {}),
            "growth": growth,
            "drift": {"first": base["drift"]["first"] if "drift" in base else _labels(base), "today": _labels(today)},
            "ancestors": [*base.get("ancestors", []), base["fingerprint"]],
        }


def columns_of(split: str) -> list[str]:
    """The columns that are written of a split."""
    further = ["truth"] if split == "unclear" else ["replayed"] if split in TRAINING_LABELED else []
    return ["user", "item", "label", "day", *further]


_COUNTS = ("carried_rows", "rows_outside_window", "pairs_seen_before", "dropped_rows")


def _labels(manifest: dict[str, Any]) -> dict[str, Any]:
    """How the labels of a log came out: what drifts from day to day."""
    classes = manifest["classes"].values()
    positives, negatives = (sum(c[kind] for c in classes) for kind in ("positives", "negatives"))
    return {
        "quartiles": manifest.get("measured_quartiles", manifest["labeling"].get("quartiles")),
        "finish_rates": manifest.get("finish_rates"),
        "positive_share": positives / max(positives + negatives, 1),
    }


def last_seen_of(dataset: Dataset, entity: Entity, first: int = 0, end: int | None = None) -> np.ndarray:
    """The day (int32) on which each id of indices `[first, end)` was seen last."""
    found = [part.to_numpy() for part in dataset.scan_id_table(entity, "last_seen", first, end)]
    count = (dataset.manifest[entity] if end is None else end) - first
    return np.concatenate(found) if found else np.zeros(count, np.int32)
