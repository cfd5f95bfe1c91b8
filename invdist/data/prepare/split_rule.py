"""Which split a clean row belongs to, where that is a function of the row: by time, by date, or by given lists."""

from __future__ import annotations

import numpy as np

from invdist.data.prepare.given_split import GivenSplit
from invdist.data.prepare.options import Options
from invdist.data.prepare.raw_log import RawLog
from invdist.data.prepare.splitting import by_time, day_number
from invdist.runtime.errors import UserError


class SplitRule:
    """The split of rows. `items` and `time_cuts` are set when they are known."""

    def __init__(self, log: RawLog, options: Options) -> None:
        if options.split == "time" and not log.has_time:
            raise UserError("split=time needs a time in the log; name its column, or split=seed")
        if options.split == "date" and not log.has_day:
            raise UserError("split=date needs a log with dates, which a synthetic feed has not; use split=time or seed")
        self.by_time = options.split == "time"
        self.days: tuple[int, int] | None = None
        if options.split == "date":
            self.days = day_number(options.valid_from or ""), day_number(options.test_from or "")
        self.given: GivenSplit | None = options.given_split()
        self.time_cuts: tuple[int, int] | None = None
        self.items = 0

    def period(self, rows: np.ndarray) -> np.ndarray | None:
        """The split (int8) of rows by when they happened, or None if that does not matter."""
        if self.time_cuts is not None:
            return by_time(rows["time"], *self.time_cuts)
        if self.days is not None:
            return by_time(rows["day"], self.days[0] - 1, self.days[1] - 1)
        return None

    def of_labeled(self, rows: np.ndarray) -> np.ndarray | None:
        """The split (int8) of labeled rows, or None if their order decides (`Shares`)."""
        if (period := self.period(rows)) is not None:
            return period
        if self.given is not None:
            user, item = (rows[name].astype(np.uint64) for name in ("user", "item"))
            return self.given.split(user * np.uint64(self.items) + item)
        return None


def time_ranks(labeled: int, options: Options) -> list[int]:
    """The ranks, among the times of so many labeled rows, of the last ones in training and in validation."""
    train = 1 - options.valid_fraction - options.test_fraction
    return [max(round(labeled * share) - 1, 0) for share in (train, train + options.valid_fraction)]
