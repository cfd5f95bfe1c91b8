"""From a raw log to a prepared data set: clean the rows (`cleaning`), split them, write them."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from invdist.data.dataset import Dataset
from invdist.data.prepare.cleaning import CleanRows, Progress
from invdist.data.prepare.labeling import Labeling
from invdist.data.prepare.onto import Growth, fixed_labeling, joined_ids
from invdist.data.prepare.options import KINDS, Kind, Options, Synthetic
from invdist.data.prepare.quantiles import order_statistics
from invdist.data.prepare.raw_log import RawLog
from invdist.data.prepare.row_rules import with_noise
from invdist.data.prepare.since_until import TooLittle, as_a_day, in_days
from invdist.data.prepare.split_rule import SplitRule, time_ranks
from invdist.data.prepare.splitting import TEST, TRAIN, VALID, Shares
from invdist.data.prepare.writer import DatasetWriter, new_dataset
from invdist.data.schema import LABELED_SPLITS, UNCLEAR_LABEL
from invdist.runtime.errors import UserError
from invdist.runtime.paths import AnyPath, path_as_given

RULES = 5
"""Raised when the same command would give other rows, or the same rows in another order, than before. What is cached
of earlier rules is then made again."""

COUNTS = (
    "log_rows",
    "missing_ids",
    "bad_durations",
    "bad_play_times",
    "missing_ratings",
    "missing_labels",
    "exact_duplicates",
    "repeated_pairs",
    "unclear_after_training",
    "hidden_labels",
)
"""What was found in the log and handled by a rule of docs/data.md, by the names in the manifest."""

_SPLIT_OPTIONS = (
    "split",
    "seed",
    "valid_fraction",
    "test_fraction",
    "training_test_fraction",
    "duplicates",
    "valid_from",
    "test_from",
)


def no_progress(stage: str, rows: int) -> None:
    """Shows nothing."""


def prepare_log(
    options: Kind,
    inputs: Sequence[str | AnyPath],
    output: str | Path,
    progress: Progress = no_progress,
    onto: str | Path | None = None,
) -> dict[str, Any]:
    """Writes the data set of the raw log in `inputs` to the new folder `output` and gives its manifest.

    `onto` is the data set of the day before (docs/daily.md). This is `invdist prepare`, `invdist.prepare_dataset` and
    the recipes of a study.
    """
    log = open_log(options, inputs)
    if onto is not None:
        return _prepare_onto(Dataset.open(str(onto)), log, options, output, progress)
    check_without_onto(options)
    return prepare(log, options.labeling(), options, output, progress)


def check_without_onto(options: Options) -> None:
    """`UserError` for options that mean something with `--onto` only."""
    for name in ("keep", "drop_unseen"):
        if getattr(options, name) is not None:
            raise UserError(f"{name} goes together with --onto DIR, the data set of the day before")


def open_log(options: Kind, inputs: Sequence[str | AnyPath]) -> RawLog:
    """The raw log in `inputs`."""
    if not inputs and not isinstance(options, Synthetic):
        kind = next(name for name, kind in KINDS.items() if isinstance(options, kind))
        raise UserError(f"{kind} needs inputs: the files or folders of the raw log (--input PATH)")
    return in_days(options.open([path_as_given(path) for path in inputs]), options)


def _prepare_onto(base: Dataset, log: RawLog, options: Kind, output: str | Path, progress: Progress) -> dict[str, Any]:
    labeling = fixed_labeling(options.labeling(), base)
    with as_a_day(), new_dataset(output, options.shard_rows) as writer:
        day = writer.folder / "day"
        prepare(log, labeling, options, day, progress, whole=False)
        today = Dataset.open(str(day), verify="fast")
        ids = joined_ids(base, today, options.drop_unseen)
        growth = Growth(base, today, options, ids)
        for entity, joined in ids.items():
            writer.add_table(entity, f"{entity}.parquet", joined.table)
        grown = growth.write(writer)
        check_classes(grown, options)
        shutil.rmtree(day)
        return writer.finish(grown)


def prepare(
    log: RawLog,
    labeling: Labeling,
    options: Options,
    output: str | Path,
    progress: Progress = no_progress,
    *,
    whole: bool = True,
) -> dict[str, Any]:
    """Writes the data set of an opened log to the new folder `output`, a path or URI, and gives its manifest.

    One that is not `whole` is joined with another, and may lack a class or a split.
    """
    rule = SplitRule(log, options)
    with new_dataset(output, options.shard_rows) as writer:
        rows = CleanRows(log, labeling, options, writer.folder, progress)
        try:
            rows.read()
            for name, table in rows.id_tables.items():
                writer.add_table(name, f"{name}.parquet", table)
            run = _Preparation(rows, rule, writer)
            run.write_rows()
        finally:
            rows.remove()
        for name, table in log.latent().items():
            if log.universe() is None:  # raw ids are the row numbers of these tables
                table = table.take(rows.id_tables[name]["raw"])
            writer.add_table(f"latent_{name}", f"latent/{name}.parquet", table)
        described = run.describe()
        if whole:
            check_classes(described, options)
        return writer.finish(described)


class _Preparation:
    """The second pass of `prepare`: clean rows are split and written."""

    def __init__(self, rows: CleanRows, rule: SplitRule, writer: DatasetWriter) -> None:
        self.rows, self.rule, self.writer = rows, rule, writer
        self.options, self.counts = rows.options, rows.counts
        rule.items = rows.items
        if rule.by_time:
            rule.time_cuts = self._find_time_cuts()
        if rule.given is not None:
            rule.given.resolve(rows.find_users, rows.find_items, rows.items)

    def _find_time_cuts(self) -> tuple[int, int]:
        """The times at which the shares of labeled rows for training and validation are reached."""
        times = self.writer.folder / "times"
        with open(times, "wb") as file:
            for rows in self.rows.buckets():
                file.write(rows["time"][rows["label"] != UNCLEAR_LABEL].astype(np.int64).data)
        count = times.stat().st_size // 8
        if not count:
            times.unlink()
            raise no_labels(self.rows.labeling.rules, self.rows.finish_rates)
        column = np.memmap(times, np.int64, "r")

        def chunks() -> Iterator[np.ndarray]:
            return (np.asarray(column[start : start + (1 << 20)]) for start in range(0, count, 1 << 20))

        cuts = order_statistics(chunks, time_ranks(count, self.options))
        times.unlink()
        return int(cuts[0]), int(cuts[1])

    def write_rows(self) -> None:
        """Writes every clean row into its split."""
        split_shares, label_shares, training_shares = all_shares(self.options)
        written = 0
        for rows in self.rows.buckets(self.counts):
            unclear = rows[rows["label"] == UNCLEAR_LABEL]
            period = self.rule.period(unclear)
            if period is not None:
                self.counts["unclear_after_training"] += int(np.count_nonzero(period != TRAIN))
                unclear = unclear[period == TRAIN]
            known = self.rows.log.has_truth
            self._add_unclear(unclear, unclear["truth"] if known else np.full(len(unclear), np.nan, np.float32))
            labeled = rows[rows["label"] != UNCLEAR_LABEL]
            split = self.rule.of_labeled(labeled)
            if split is None:
                split = split_shares.cut(len(labeled))
            elif self.rule.given is not None:
                self.rule.given.note(split)
            self._add_labeled("valid", labeled[split == VALID])
            self._add_labeled("test", labeled[split == TEST])
            train = labeled[split == TRAIN]
            hidden = label_shares.cut(len(train)) == 1
            self.counts["hidden_labels"] += int(np.count_nonzero(hidden))
            self._add_unclear(train[hidden], train[hidden]["label"].astype(np.float32))
            train = with_noise(train[~hidden], self.options.label_noise, self.options.seed)
            part = training_shares.cut(len(train))
            self._add_labeled("train", train[part == 0])
            self._add_labeled("training_test", train[part == 1])
            written += len(rows)
            self.rows.progress("writing", written)

    def _add_labeled(self, split: str, rows: np.ndarray) -> None:
        positives = int(np.count_nonzero(rows["label"] == 1))
        self.counts[f"{split} positives"] += positives
        self.counts[f"{split} negatives"] += len(rows) - positives
        columns = {name: np.ascontiguousarray(rows[name]) for name in ("user", "item", "label")}
        self.writer.add(split, columns)

    def _add_unclear(self, rows: np.ndarray, truth: np.ndarray) -> None:
        columns = {name: np.ascontiguousarray(rows[name]) for name in ("user", "item")}
        self.writer.add("unclear", {**columns, "truth": np.ascontiguousarray(truth)})

    def describe(self) -> dict[str, Any]:
        """The manifest's part about rows."""
        if self.rule.given is not None:
            self.rule.given.check_all_found()
        return describe_rows(self.rows, self.rule, self.writer.rows["unclear"])


class Found(Protocol):
    """What is known of the rows of a log when they are written."""

    log: RawLog
    options: Options
    labeling: Labeling
    users: int
    items: int
    counts: Counter[str]
    finish_rates: dict[str, float] | None
    quartiles: tuple[float, float] | None


def all_shares(options: Options) -> tuple[Shares, Shares, Shares]:
    """How rows are cut: labeled ones into train, valid and test; training labels into kept and hidden; kept ones into
    train and training_test."""
    fractions = (1 - options.valid_fraction - options.test_fraction, options.valid_fraction, options.test_fraction)
    return (
        Shares(fractions),
        Shares([options.kept_labels, 1 - options.kept_labels]),
        Shares([1 - options.training_test_fraction, options.training_test_fraction]),
    )


def describe_rows(rows: Found, rule: SplitRule, unclear: int) -> dict[str, Any]:
    """The manifest's part about rows."""
    classes = {
        split: {kind: rows.counts.pop(f"{split} {kind}", 0) for kind in ("positives", "negatives")}
        for split in LABELED_SPLITS
    }
    positives, negatives = (sum(c[kind] for c in classes.values()) for kind in ("positives", "negatives"))
    summary = {
        "users": rows.users,
        "items": rows.items,
        "positives": positives,
        "negatives": negatives,
        "unclear": unclear,
        "density": (positives + negatives) / (rows.users * rows.items),
    }
    cut = {name: getattr(rows.options, name) for name in _SPLIT_OPTIONS}
    noise = {"label_noise": rows.options.label_noise} if rows.options.label_noise else {}
    return {
        "rules": RULES,
        "users": rows.users,
        "items": rows.items,
        "summary": summary,
        "classes": classes,
        "counts": {name: rows.counts[name] for name in COUNTS},
        "finish_rates": rows.finish_rates,
        "measured_quartiles": rows.quartiles,
        "labeling": asdict(rows.labeling),
        "cut": {**cut, "label_fraction": rows.options.kept_labels, **noise, "time_cuts": rule.time_cuts},
        "source": rows.log.describe(),
    }


def check_classes(manifest: dict[str, Any], options: Options) -> None:
    """`TooLittle` if nothing could be learned or ranked: a split of a data set lacks a class."""
    classes, rules, rates = manifest["classes"], manifest["labeling"]["rules"], manifest["finish_rates"]
    if not sum(sum(counts.values()) for counts in classes.values()):
        raise no_labels(rules, rates)
    for split in ("train", "valid", *(["test"] if options.test_fraction else [])):
        for kind, count in classes[split].items():
            if not count:
                instead = "" if "day" in manifest else "; choose another rule, other thresholds or another split"
                raise TooLittle(
                    f"{split} has no {kind} under rule {'+'.join(rules)} ({sum(classes[split].values())} rows of one "
                    f"class): nothing to learn or to rank{instead}{_finish_rate_hint(rates)}"
                )


def no_labels(rules: Sequence[str], rates: dict[str, float] | None) -> TooLittle:
    """What is said of a log in which no row has a label."""
    rule = "+".join(rules)
    return TooLittle(f"no row is clear under rule {rule}; nothing could be trained or tested{_finish_rate_hint(rates)}")


def _finish_rate_hint(rates: dict[str, float] | None) -> str:
    if rates is None:
        return ""
    return f"\nfinish rates: {finish_rate_text(rates)}" + (f"\n{hint}" if (hint := unit_mistake(rates)) else "")


def finish_rate_text(rates: dict[str, float]) -> str:
    """Quantiles of finish rates in one line."""
    return ", ".join(f"{name} {value:.3g}" for name, value in rates.items())


def unit_mistake(rates: dict[str, float] | None) -> str | None:
    """What to try if finish rates look like seconds divided by milliseconds or the reverse, else None."""
    if rates is None or (rates["90%"] >= 0.05 and rates["50%"] <= 200):
        return None
    units = ("s", "ms") if rates["50%"] < 1 else ("ms", "s")
    return (
        f"the median finish rate is {rates['50%']:.3g}: are play times in {units[0]} and durations in {units[1]}? Then "
        f"set play_time_unit={units[0]} duration_unit={units[1]}; otherwise check columns.play_time, columns.duration"
    )
