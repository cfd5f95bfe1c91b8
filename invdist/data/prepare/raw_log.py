"""The interface of a raw log, from whatever file or generator it comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import pyarrow as pa

LABELS = ("label", "long_view")
"""Signals that are labels already: 1, 0, or nothing."""
SIGNALS = ("play_time", "duration", "like", "hate", "rating", *LABELS)
"""What may be observed about an exposure. Each labeling rule reads some of these."""


class RawLog(Protocol):
    """A log that can be read once, in batches of bounded size: `batches` in one process, `pieces` in many.

    Batches have the columns `user` and `item` (any type), the signals that were asked for (float64, null or NaN where
    nothing was observed), and `time` (int64), `day` (int64, days since 1970) and `truth` (float32, the true
    preference) if `has_time`, `has_day` and `has_truth`.
    """

    has_time: bool
    has_day: bool
    has_truth: bool
    looks: bool
    """Whether `look` has to be called for every piece before any is read."""

    def describe(self) -> dict[str, Any]:
        """Where the log comes from, for the manifest."""
        ...

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows."""
        ...

    def pieces(self, rows: int, size: int) -> list[Any]:
        """Parts of the log that can be read alone, of about `rows` rows or `size` bytes, in the order of the log."""
        ...

    def look(self, piece: Any) -> Any:
        """What reading needs to know of a piece, as plain data; `after_look` gets that of all of them."""
        ...

    def after_look(self, found: Sequence[Any]) -> None:
        """Takes what `look` found in each piece, in their order; `read` may follow, in any process."""
        ...

    def read(self, piece: Any) -> Iterator[pa.RecordBatch]:
        """The rows of a piece: all pieces in their order have what `batches` gives."""
        ...

    def universe(self) -> tuple[int, int] | None:
        """(users, items) when ids are dense indices already; None when they have to be mapped."""
        ...

    def latent(self) -> dict[str, pa.Table]:
        """Tables of the known truth behind the log, by name; empty for a real log."""
        ...
