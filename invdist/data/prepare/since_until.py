"""Some days of a log: what `since` and `until` leave of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from invdist.data.prepare.options import Options
from invdist.data.prepare.raw_log import RawLog
from invdist.data.prepare.splitting import day_number
from invdist.runtime.errors import UserError
from invdist.runtime.paths import AnyPath


def in_days(log: RawLog, options: Options) -> RawLog:
    """The log, or its rows of the days that `options.since` and `options.until` name."""
    if not (options.since or options.until):
        return log
    if not log.has_day:
        raise UserError("since and until need a log with dates, which this one has not")
    return _InDays(log, options.since, options.until)


class TooLittle(UserError):
    """A log, or a day of it, has too few rows or labels to be a data set."""


@contextlib.contextmanager
def as_a_day() -> Iterator[None]:
    """Inside, an error about too few rows or labels says what to do with such a day."""
    try:
        yield
    except TooLittle as error:
        raise TooLittle(
            f"{error}\na day with too little goes together with the next one: prepare both at once, with since= and "
            "until= or with both logs as --input"
        ) from None


def no_rows(log: RawLog) -> TooLittle:
    """What is said of a log that has no rows."""
    about = log.describe()
    days = [f"{name}={about[name]}" for name in ("since", "until") if about.get(name)]
    return TooLittle(f"the log has no rows{' with ' if days else ''}{' and '.join(days)}")


class _InDays:
    """A `RawLog` whose rows are those of another one between two days, both taken."""

    def __init__(self, log: RawLog, since: str | None, until: str | None) -> None:
        self._log, self._since, self._until = log, since, until
        self.has_time, self.has_day, self.has_truth = log.has_time, log.has_day, log.has_truth
        self.looks = log.looks

    def describe(self) -> dict[str, Any]:
        """Where the log comes from, and its days."""
        return {**self._log.describe(), "since": self._since, "until": self._until}

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows of these days."""
        return self._chosen(self._log.batches())

    def pieces(self, rows: int, size: int) -> list[Any]:
        """Those of the whole log."""
        return self._log.pieces(rows, size)

    def look(self, piece: Any) -> Any:
        """What the whole log needs to know."""
        return self._log.look(piece)

    def after_look(self, found: Sequence[Any]) -> None:
        """What the whole log needs to know."""
        self._log.after_look(found)

    def read(self, piece: Any) -> Iterator[pa.RecordBatch]:
        """The rows of a piece that are of these days."""
        return self._chosen(self._log.read(piece))

    @property
    def times(self) -> dict[str, AnyPath]:
        """Those of the whole log."""
        return getattr(self._log, "times", {})

    def _chosen(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        ends = np.iinfo(np.int64)
        first = day_number(self._since) if self._since else ends.min
        last = day_number(self._until) if self._until else ends.max
        for batch in batches:
            day = batch["day"].to_numpy()
            if len(kept := batch.filter(pa.array((day >= first) & (day <= last)))):
                yield kept

    def universe(self) -> tuple[int, int] | None:
        """That of the whole log."""
        return self._log.universe()

    def latent(self) -> dict[str, pa.Table]:
        """That of the whole log."""
        return self._log.latent()
