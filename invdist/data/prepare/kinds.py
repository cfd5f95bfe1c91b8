"""The kinds of log that `invdist prepare` knows: for each, its options and how it becomes a `RawLog` with rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Gt, Le

from invdist.config.fields import Count, CountOrZero, OneOf, OpenShare, Section
from invdist.data.prepare.given import GivenSplit
from invdist.data.prepare.labeling import COLUMNS, Labeling
from invdist.data.prepare.log import RawLog
from invdist.data.prepare.pipeline import Cut
from invdist.data.prepare.readers import FileLog, Ml1mLog, find_files
from invdist.data.prepare.synthetic import PRESETS, Scale, SyntheticLog
from invdist.runtime.errors import UserError


class Options(Section):
    """What every kind has: how rows are divided and written."""

    seed: CountOrZero = 0
    """Seed of the split, of the row order and of everything else that is random."""
    split: Literal["seed", "time", "given"] = "seed"
    """`seed`: at random; `time`: the earliest rows train, the latest test; `given`: by two files of pairs."""
    valid_file: str | None = None
    """split=given: the file of (user, item) pairs that are validation rows, plain or gz."""
    test_file: str | None = None
    """split=given: the file of (user, item) pairs that are test rows, plain or gz."""
    valid_fraction: OpenShare = 0.2
    """Share of labeled rows for validation."""
    test_fraction: OpenShare = 0.2
    """Share of labeled rows for the test."""
    training_test_fraction: OpenShare = 0.1
    """Share of the training rows that become training_test: they judge update directions."""
    label_fraction: Annotated[float, Gt(0), Le(1)] = 1.0
    """Share of the training labels to keep; the other rows become unclear, their labels kept apart as truth."""
    duplicates: Literal["last", "first"] = "last"
    """Which row of a repeated (user, item) pair counts, by time and then by the order of the log."""
    shard_rows: Count = 1 << 20
    """Rows per parquet shard."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Problems that concern several options."""
        if self.valid_fraction + self.test_fraction >= 1:
            yield "valid_fraction", "together with test_fraction it leaves nothing to train on"
        if (self.split == "given") != bool(self.valid_file and self.test_file):
            yield "split", "split=given goes together with valid_file=PATH and test_file=PATH"

    def cut(self) -> Cut:
        """The options that say how rows are divided."""
        return Cut(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Cut)})

    def given(self) -> GivenSplit | None:
        """The given split, if there is one."""
        if self.valid_file and self.test_file:
            return GivenSplit(Path(self.valid_file), Path(self.test_file))
        return None


class RatingOptions(Options):
    """Ratings: what counts as liked."""

    positive_from: float = 3.0
    """Ratings from here on are positive."""
    negative_to: float = 2.0
    """Ratings up to here are negative; what lies between is unclear."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Problems that concern several options."""
        yield from super().check()
        if self.negative_to >= self.positive_from:
            yield "negative_to", f"expected below positive_from ({self.positive_from:g})"

    def labeling(self) -> Labeling:
        """The rating rule."""
        return Labeling(rules=("rating",), positive_from=self.positive_from, negative_to=self.negative_to)


def _chains() -> list[str]:
    names = [name for name in COLUMNS if name != "rating"]
    return [*names, *(f"feedback+{name}" for name in names if name != "feedback")]


class PlayOptions(Options):
    """Plays: which of them are clear."""

    rule: Annotated[str, OneOf(_chains)] = "finish_rate"
    """`finish_rate`, `play_time` (quartiles) or `feedback` (like/hate); feedback+X asks X where there is none."""
    finish_above: OpenShare = 0.8
    """Finish rates above this are positive."""
    finish_below: OpenShare = 0.2
    """Finish rates below this are negative; what lies between is unclear."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Problems that concern several options."""
        yield from super().check()
        if self.finish_below >= self.finish_above:
            yield "finish_below", f"expected below finish_above ({self.finish_above:g})"

    def labeling(self) -> Labeling:
        """The chosen chain of rules."""
        return Labeling(
            rules=tuple(self.rule.split("+")), finish_above=self.finish_above, finish_below=self.finish_below
        )


class Ml1m(RatingOptions):
    """The published MovieLens-1M zip, or its ratings.dat, or the folder that holds that."""

    def open(self, inputs: Sequence[Path]) -> RawLog:
        """The log in the one input."""
        if len(inputs) != 1:
            raise UserError(f"ml-1m takes one --input, the zip or ratings.dat, not {len(inputs)}")
        return Ml1mLog(inputs[0])


class RatingColumns(Section):
    """Column names of a rating log."""

    user: str = "user"
    item: str = "item"
    rating: str = "rating"
    time: str = "time"


class Ratings(RatingOptions):
    """Any CSV or parquet files with user, item and rating."""

    columns: RatingColumns = RatingColumns()
    id_type: Literal["auto", "string"] = "auto"
    """How ids in CSV files are read; parquet has its own types."""

    def open(self, inputs: Sequence[Path]) -> RawLog:
        """The log in the input files and folders."""
        columns = self.columns.model_dump()
        return FileLog("ratings", find_files(inputs), columns, self.labeling().columns, self.id_type)


class PlayColumns(Section):
    """Column names of a play log. Like and hate are looked for only where a rule needs them; time, where there is any,
    settles which row of a pair is the last."""

    user: str = "user"
    item: str = "item"
    play_time: str = "play_time"
    duration: str = "duration"
    like: str = "like"
    hate: str = "hate"
    time: str = "time"


class MicroVideo(PlayOptions):
    """Any CSV or parquet play log."""

    columns: PlayColumns = PlayColumns()
    id_type: Literal["auto", "string"] = "auto"
    """How ids in CSV files are read; parquet has its own types."""

    def open(self, inputs: Sequence[Path]) -> RawLog:
        """The log in the input files and folders."""
        columns = self.columns.model_dump()
        return FileLog("microvideo", find_files(inputs), columns, self.labeling().columns, self.id_type)


class KuaiRand(PlayOptions):
    """KuaiRand logs as published: log_*.csv, plain or gz, one or several, or the folder that holds them."""

    def open(self, inputs: Sequence[Path]) -> RawLog:
        """The log in the input files and folders."""
        columns = {
            "user": "user_id",
            "item": "video_id",
            "play_time": "play_time_ms",
            "duration": "duration_ms",
            "like": "is_like",
            "hate": "is_hate",
            "time": "time_ms",
        }
        return FileLog(
            "kuairand", find_files(inputs, "log_*"), columns, self.labeling().columns, usual_time=columns["time"]
        )


class Synthetic(PlayOptions):
    """A generated feed with known truth; it takes no --input."""

    preset: Literal["tiny", "small", "microvideo"] = "small"
    """Size: `tiny` for tests, `small` for a first run, `microvideo` as the paper's data set."""
    users: Count | None = None
    """Users, instead of the preset's."""
    items: Count | None = None
    """Items, instead of the preset's."""
    labeled_rows: Count | None = None
    """Rows that are clear by finish rate, instead of the preset's."""
    positive_share: OpenShare | None = None
    """Share of positives among clear rows, instead of the preset's."""

    def open(self, inputs: Sequence[Path]) -> RawLog:
        """The generator."""
        if inputs:
            raise UserError("synthetic takes no --input: it makes its own log")
        wanted = {f.name: getattr(self, f.name) for f in dataclasses.fields(Scale)}
        scale = dataclasses.replace(PRESETS[self.preset], **{k: v for k, v in wanted.items() if v is not None})
        return SyntheticLog(self.preset, scale, self.seed)


Kind = Ml1m | KuaiRand | MicroVideo | Ratings | Synthetic

KINDS: dict[str, type[Kind]] = {
    "ml-1m": Ml1m,
    "kuairand": KuaiRand,
    "microvideo": MicroVideo,
    "ratings": Ratings,
    "synthetic": Synthetic,
}
