"""The options of `invdist prepare`: one class for each kind of log, which opens it and says how it is labeled."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from invdist.config.fields import BelowOne, Count, CountOrZero, OneOf, OpenShare, Section, Share, build
from invdist.data.prepare.daily_feed import FIRST_DAY, DailyFeed
from invdist.data.prepare.given_split import GivenSplit
from invdist.data.prepare.labeling import Labeling
from invdist.data.prepare.logs import FileLog, KuaiRandLog, Ml1mLog
from invdist.data.prepare.raw_log import RawLog
from invdist.data.prepare.readers import CsvFormat, find_files
from invdist.data.prepare.splitting import day_number
from invdist.data.prepare.synthetic import PRESETS, SyntheticLog
from invdist.runtime.errors import UserError
from invdist.runtime.paths import AnyPath, path_as_given

Unit = Literal["s", "ms"]


class Options(Section):
    """What every kind has: how rows are split and written."""

    seed: CountOrZero = 0
    """Seed of the split, of the row order and of everything else that is random."""
    split: Literal["seed", "time", "date", "given"] = "seed"
    """`seed`: at random; `time`: the earliest rows train, the latest test; `date`: by day; `given`: by two files."""
    valid_from: str | None = None
    """split=date: the first day of validation, as 2022-04-25; rows before it train."""
    test_from: str | None = None
    """split=date: the first day of the test."""
    utc_offset: Annotated[float, Ge(-14), Le(14)] = 0.0
    """split=date, since, until: hours from UTC to the calendar that days are counted in, for times that are numbers."""
    since: str | None = None
    """Take only rows of this day, as 2022-04-25, and of later ones."""
    until: str | None = None
    """Take only rows of this day, as 2022-04-25, and of earlier ones; rows without a day are taken too."""
    keep: CountOrZero | None = None
    """--onto: how many days before this one have their rows carried along; null: all."""
    older: Literal["drop", "unclear"] = "drop"
    """--onto: rows of days before those to keep are dropped, or stay as exposures without a label (`unclear`). Labels
    that only validated or tested the model of the day before have not been learned from: with `unclear` they train."""
    replay: Share = 0.2
    """--onto, older=unclear: share of the older labels that train again beside the new ones, others each day."""
    drop_unseen: Count | None = None
    """--onto: ids that were not seen for so many days are dropped with their rows; null: none."""
    valid_file: str | None = None
    """split=given: the file of (user, item) pairs that are validation rows, plain or gz."""
    test_file: str | None = None
    """split=given: the file of (user, item) pairs that are test rows, plain or gz."""
    valid_fraction: OpenShare = 0.2
    """split=seed, split=time: share of labeled rows for validation."""
    test_fraction: BelowOne = 0.2
    """split=seed, split=time: share of labeled rows for the test; 0: none, as where the next day is the test."""
    training_test_fraction: OpenShare = 0.1
    """Share of the training rows that become training_test, which chooses update directions."""
    label_fraction: Annotated[float, Gt(0), Le(1)] = 1.0
    """Share of the training labels to keep; the other rows become unclear, with their labels kept as truth."""
    label_noise: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """Share of the kept training labels to invert, for studies of noise; validation and test stay as they are."""
    duplicates: Literal["last", "first"] = "last"
    """Which row of a repeated (user, item) pair counts, by time and then by the order of the log."""
    shard_rows: Count = 1 << 20
    """Rows per parquet shard."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Problems that concern several options."""
        if self.valid_fraction + self.test_fraction >= 1:
            yield "valid_fraction", "together with test_fraction it leaves nothing to train on"
        if [bool(self.valid_file), bool(self.test_file)] != [self.split == "given"] * 2:
            yield "split", "split=given goes together with valid_file=PATH and test_file=PATH"
        if [bool(self.valid_from), bool(self.test_from)] != [self.split == "date"] * 2:
            yield "split", "split=date goes together with valid_from=YYYY-MM-DD and test_from=YYYY-MM-DD"
        elif self.valid_from and self.test_from:
            try:
                if day_number(self.valid_from) >= day_number(self.test_from):
                    yield "test_from", f"expected a later day than valid_from ({self.valid_from})"
            except ValueError:
                yield "split", f"expected dates as 2022-04-25, not {self.valid_from!r} and {self.test_from!r}"
        try:
            if self.since and self.until and day_number(self.since) > day_number(self.until):
                yield "until", f"expected {self.since} (since) or a later day"
        except ValueError:
            yield "since", f"expected dates as 2022-04-25, not {self.since!r} and {self.until!r}"
        if self.older == "unclear" and self.keep is None:
            yield "older", "unclear goes together with keep=N, or with keep=0 for all days before this one"
        if self.older == "drop" and self.replay != type(self).model_fields["replay"].default:
            yield "replay", "goes together with older=unclear and keep=N"

    @property
    def kept_labels(self) -> float:
        """Share of the training labels to keep."""
        return self.label_fraction

    @property
    def day_offset(self) -> float | None:
        """`utc_offset` if days are needed, else None."""
        return self.utc_offset if self.split == "date" or self.since or self.until else None

    def given_split(self) -> GivenSplit | None:
        """The given split, if there is one."""
        files = [path_as_given(file) for file in (self.valid_file, self.test_file) if file]
        return GivenSplit(*files) if len(files) == 2 else None


class FileOptions(Options):
    """Logs in CSV or parquet files: how CSV is read."""

    id_type: Literal["auto", "string"] = "auto"
    """Ids in CSV files: numbers if all are whole numbers, else text; or always text. Parquet has its own types."""
    delimiter: str | None = None
    """The character between the fields of a CSV line; `tab` is one. By default a comma, in .tsv files a tab."""
    encoding: str = "utf-8"
    """The encoding of CSV files, by Python's names."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Problems that concern several options."""
        yield from super().check()
        delimiter = self._csv.delimiter
        if delimiter is not None and (len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n'):
            yield "delimiter", f"expected one ASCII character, or tab, not {self.delimiter!r}"
        try:
            "".encode(self.encoding)
        except (LookupError, ValueError):
            yield "encoding", f"Python knows no encoding {self.encoding!r}; expected utf-8, latin-1, gb18030 or another"

    @property
    def _csv(self) -> CsvFormat:
        return CsvFormat("\t" if self.delimiter in ("tab", "\\t") else self.delimiter, self.encoding)

    def _log(
        self, kind: str, inputs: Sequence[AnyPath], columns: Section, signals: Sequence[str], factors: dict[str, float]
    ) -> FileLog:
        """The log of a kind in files and folders; `factors` bring its columns to one unit."""
        return FileLog(
            kind,
            find_files(inputs),
            columns.model_dump(),
            signals,
            id_type=self.id_type,
            csv=self._csv,
            utc_offset=self.day_offset,
            factors=factors,
        )


class RatingOptions(Options):
    """Ratings: what counts as liked."""

    positive_from: float = 3.0
    """Ratings from here on are positive."""
    negative_to: float = 2.0
    """Ratings up to here are negative, those between are unclear."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Problems that concern several options."""
        yield from super().check()
        if self.negative_to >= self.positive_from:
            yield "negative_to", f"expected below positive_from ({self.positive_from:g})"

    def labeling(self) -> Labeling:
        """The rating rule."""
        return Labeling(rules=("rating",), positive_from=self.positive_from, negative_to=self.negative_to)


def _rules(*more: str) -> list[str]:
    names = ["finish_rate", "play_time", "feedback", *more]
    return [*names, *(f"feedback+{name}" for name in names if name != "feedback")]


def _microvideo_rules() -> list[str]:
    return _rules("label", "long_view")


def _kuairand_rules() -> list[str]:
    return _rules("long_view")


class PlayOptions(Options):
    """Plays: which of them are clear."""

    rule: Annotated[str, OneOf(_rules)] = "finish_rate"
    """`finish_rate`, `play_time` (quartiles) or `feedback` (like/hate); feedback+X: X where there is no feedback."""
    finish_above: OpenShare = 0.8
    """Finish rates above this are positive."""
    finish_below: OpenShare = 0.2
    """Finish rates below this are negative, those between are unclear."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Problems that concern several options."""
        yield from super().check()
        if self.finish_below >= self.finish_above:
            yield "finish_below", f"expected below finish_above ({self.finish_above:g})"

    def labeling(self) -> Labeling:
        """The chosen rules."""
        return Labeling(
            rules=tuple(self.rule.split("+")), finish_above=self.finish_above, finish_below=self.finish_below
        )


class Ml1m(RatingOptions):
    """The published MovieLens-1M zip, or its ratings.dat, or the folder that has it."""

    def open(self, inputs: Sequence[AnyPath]) -> RawLog:
        """The log in the one input."""
        if len(inputs) != 1:
            raise UserError(f"ml-1m takes one --input, the zip or ratings.dat, not {len(inputs)}")
        return Ml1mLog(inputs[0], self.day_offset)


class RatingColumns(Section):
    """Column names of a rating log."""

    user: str = "user"
    item: str = "item"
    rating: str = "rating"
    label: str = "label"
    """rule=label: 1 positive, 0 negative, empty unclear."""
    time: str = "time"
    date: str = "date"


class Ratings(FileOptions, RatingOptions):
    """Any CSV or parquet files with user, item and rating (or label)."""

    rule: Literal["rating", "label"] = "rating"
    """`rating`, or `label`: the log has labels of its own."""
    columns: RatingColumns = RatingColumns()

    def labeling(self) -> Labeling:
        """The chosen rule."""
        rating = super().labeling()
        return rating if self.rule == "rating" else dataclasses.replace(rating, rules=("label",))

    def open(self, inputs: Sequence[AnyPath]) -> RawLog:
        """The log in the input files and folders."""
        return self._log("ratings", inputs, self.columns, self.labeling().columns, factors={})


class PlayColumns(Section):
    """Column names of a play log. A rule needs only its own columns; `time`, if there is one, says which row of a
    pair is the last; `date`, if there is one, is what split=date goes by."""

    user: str = "user"
    item: str = "item"
    play_time: str = "play_time"
    duration: str = "duration"
    like: str = "like"
    hate: str = "hate"
    label: str = "label"
    long_view: str = "long_view"
    time: str = "time"
    date: str = "date"


class MicroVideo(FileOptions, PlayOptions):
    """Any CSV or parquet play log."""

    rule: Annotated[str, OneOf(_microvideo_rules)] = "finish_rate"
    """`finish_rate`, `play_time` (quartiles), `feedback` (like/hate), or a column that is a label already (1 positive,
    0 negative, empty unclear): `label`, `long_view`; feedback+X takes X where there is no feedback."""
    columns: PlayColumns = PlayColumns()
    play_time_unit: Unit = "ms"
    """Unit of play times. Only its ratio to duration_unit matters."""
    duration_unit: Unit = "ms"
    """Unit of durations."""

    def open(self, inputs: Sequence[AnyPath]) -> RawLog:
        """The log in the input files and folders."""
        seconds = {"play_time": self.play_time_unit, "duration": self.duration_unit}
        factors = {name: 1000.0 for name, unit in seconds.items() if unit == "s"}
        return self._log("microvideo", inputs, self.columns, self.labeling().columns, factors)


class KuaiRand(PlayOptions):
    """KuaiRand logs as published (log_*.csv, plain or gz, or the folder that has them); exposures_*.csv beside them
    are read with rule=long_view."""

    rule: Annotated[str, OneOf(_kuairand_rules)] = "finish_rate"
    """`finish_rate`, `play_time` (quartiles), `feedback` (like/hate) or `long_view` (KuaiRand's own 0/1 label);
    feedback+X takes X where there is no feedback."""

    def open(self, inputs: Sequence[AnyPath]) -> RawLog:
        """The log in the input files and folders."""
        return KuaiRandLog(inputs, self.labeling().columns, self.day_offset)


class Synthetic(PlayOptions):
    """A generated feed with known truth; it takes no --input."""

    label_fraction: Annotated[float, Gt(0), Le(1)] | None = None
    """Share of the training labels to keep, instead of the preset's (small: 0.1, the others 1)."""
    preset: Literal["tiny", "small", "microvideo"] = "small"
    """`tiny` for tests, `small` (sparse labels) for a first run, `microvideo` of the size of the paper's data set."""
    users: Count | None = None
    """Users, instead of the preset's."""
    items: Count | None = None
    """Items, instead of the preset's."""
    labeled_rows: Count | None = None
    """Rows that are clear by finish rate, instead of the preset's."""
    positive_share: OpenShare | None = None
    """Share of positives among clear rows, instead of the preset's."""
    days: Count | None = None
    """A feed of so many days from 2026-01-01 on, with new users and items each day; null: one log without dates."""
    drift: Share = 0.1
    """days: how far a user's taste moves from one day to the next, as a share of its length."""
    arriving: Share = 0.3
    """days: share of the users and items that come after the first day."""

    @property
    def kept_labels(self) -> float:
        """Share of the training labels to keep."""
        return PRESETS[self.preset].label_fraction if self.label_fraction is None else self.label_fraction

    def open(self, inputs: Sequence[AnyPath]) -> RawLog:
        """The generator."""
        if inputs:
            raise UserError("synthetic takes no --input: it makes its own log")
        wanted = {name: getattr(self, name) for name in ("users", "items", "labeled_rows", "positive_share")}
        scale = dataclasses.replace(PRESETS[self.preset], **{k: v for k, v in wanted.items() if v is not None})
        if self.days is None:
            return SyntheticLog(self.preset, scale, self.seed)
        upto = day_number(self.until) - day_number(FIRST_DAY) if self.until else self.days - 1
        if upto < 0:
            raise UserError(f"until={self.until}: the feed begins on {FIRST_DAY}")
        span = {"days": self.days, "drift": self.drift, "arriving": self.arriving}
        return DailyFeed(self.preset, scale, self.seed, upto=upto, **span)


Kind = Ml1m | KuaiRand | MicroVideo | Ratings | Synthetic

KINDS: dict[str, type[Kind]] = {
    "ml-1m": Ml1m,
    "kuairand": KuaiRand,
    "microvideo": MicroVideo,
    "ratings": Ratings,
    "synthetic": Synthetic,
}


def build_options(kind: str, mapping: Mapping[str, Any], overrides: Iterable[str] = (), *, source: str = "") -> Kind:
    """The checked options of a kind of log; `UserError` names everything that is wrong and where (`source`)."""
    if kind not in KINDS:
        raise UserError(f"{kind!r} is no kind of log; expected {', '.join(KINDS)}")
    # YAML reads 2022-04-25 as a date.
    plain = {key: str(value) if isinstance(value, datetime.date) else value for key, value in mapping.items()}
    return build(KINDS[kind], plain, overrides, source=source)
