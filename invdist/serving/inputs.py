"""User-item pairs to score, in parts that any process can read in any order.

A part is a range of row groups of a parquet file, or a whole CSV file (which cannot be read from the middle). The
parts of an input depend only on its files and on `part_rows`, so an interrupted job finds its place again.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from invdist.data.dataset import Dataset
from invdist.data.prepare.readers import canonical, column_names, find_files, open_parquet, read_columns
from invdist.data.schema import MANIFEST as DATASET_FILE
from invdist.runtime.errors import UserError
from invdist.runtime.paths import AnyPath, path_as_given
from invdist.serving.raw_ids import UNKNOWN, RawIds
from invdist.serving.run import TrainedRun

PART_ROWS = 1 << 20
_BATCH_ROWS = 1 << 18
COUNTS = ("rows", "unreadable", "unknown_users", "unknown_items")
"""Rows of an input; rows with a missing id or one of the wrong type; rows with an unknown user, or an unknown item."""


class MatchedPairs(NamedTuple):
    """Pairs of an input, matched with a data set: one row for each pair given, in order."""

    user: np.ndarray
    """Index (int64), or `UNKNOWN`."""
    item: np.ndarray
    raw_user: pa.Array
    """Raw id in the data set's type; null if the given one is missing or of the wrong type."""
    raw_item: pa.Array
    counts: Counter[str]

    @property
    def known(self) -> np.ndarray:
        """Whether the data set has both the user and the item (bool)."""
        return (self.user != UNKNOWN) & (self.item != UNKNOWN)

    def where(self, mask: np.ndarray) -> MatchedPairs:
        """The rows that `mask` selects; the counts stay."""
        rows = pa.array(mask)
        return MatchedPairs(
            self.user[mask], self.item[mask], self.raw_user.filter(rows), self.raw_item.filter(rows), self.counts
        )


def match(user: pa.Array, item: pa.Array, users: RawIds, items: RawIds) -> MatchedPairs:
    """Finds the indices of raw ids."""
    user, item = users.cast(user), items.cast(item)
    pairs = MatchedPairs(users.indices(user), items.indices(item), user, item, Counter(rows=len(user)))
    if pairs.known.all():
        return pairs
    readable = user.is_valid().to_numpy(zero_copy_only=False) & item.is_valid().to_numpy(zero_copy_only=False)
    pairs.counts["unreadable"] = int(np.count_nonzero(~readable))
    pairs.counts["unknown_users"] = int(np.count_nonzero(readable & (pairs.user == UNKNOWN)))
    pairs.counts["unknown_items"] = int(np.count_nonzero(readable & (pairs.item == UNKNOWN)))
    return pairs


@dataclass(frozen=True, slots=True)
class InputPart:
    """Some row groups of a parquet file, or a whole CSV file."""

    name: str
    """`part-00000`, which is also the name of its file in an output."""
    file: str
    """An absolute path, because workers have other working directories; or a file of the data set."""
    row_groups: tuple[int, ...] | None = None


class PairSource(Protocol):
    """An input of pairs."""

    parts: list[InputPart]

    def identity(self) -> list[Any]:
        """What distinguishes this input from another one, as plain data."""
        ...

    def read(self, part: InputPart, users: RawIds, items: RawIds) -> Iterator[MatchedPairs]:
        """The pairs of a part, batch by batch."""
        ...


class FilePairs:
    """Pairs of raw ids in CSV or parquet files (a `PairSource`)."""

    def __init__(
        self, inputs: Sequence[str | AnyPath], user: str = "user", item: str = "item", part_rows: int = PART_ROWS
    ) -> None:
        self.columns = {"user": user, "item": item}
        self.files = find_files([path_as_given(path) for path in inputs])
        pieces: list[tuple[AnyPath, tuple[int, ...] | None]] = []
        for file in self.files:
            _check_columns(file, self.columns)
            groups = _packed(_group_rows(file), part_rows) if file.suffix == ".parquet" else [None]
            pieces += [(file, group) for group in groups]
        self.parts = [
            InputPart(f"part-{n:05d}", str(file.absolute()), groups) for n, (file, groups) in enumerate(pieces)
        ]

    def identity(self) -> list[Any]:
        """Columns, and the name, size and time of each file."""
        stats = [(file.name, file.stat()) for file in self.files]
        return [self.columns, *([name, stat.st_size, stat.st_mtime_ns] for name, stat in stats), _division(self.parts)]

    def read(self, part: InputPart, users: RawIds, items: RawIds) -> Iterator[MatchedPairs]:
        """The pairs of a part, batch by batch."""
        return (match(user, item, users, items) for user, item in self.read_raw(part))

    def read_raw(self, part: InputPart) -> Iterator[tuple[pa.Array, pa.Array]]:
        """The raw ids (users, items) of a part as they are there, batch by batch."""
        file = path_as_given(part.file)
        text = dict.fromkeys(self.columns.values(), pa.string())
        for batch in read_columns(file, list(self.columns.values()), text, part.row_groups):
            batch = canonical(batch.rename_columns(list(self.columns)), file)
            yield batch["user"], batch["item"]


class UnclearPairs:
    """The unclear exposures of the run's own data set (a `PairSource`). All of them are known."""

    def __init__(self, dataset: Dataset, part_rows: int = PART_ROWS) -> None:
        self.dataset = dataset
        self.parts = []
        for shard in dataset.shards("unclear"):
            with dataset.parquet(shard["file"]) as file:
                rows = _rows_of_groups(file.metadata)
            for groups in _packed(rows, part_rows):
                self.parts.append(InputPart(f"part-{len(self.parts):05d}", shard["file"], groups))

    def identity(self) -> list[Any]:
        """The content of the data set."""
        return [self.dataset.fingerprint, _division(self.parts)]

    def read(self, part: InputPart, users: RawIds, items: RawIds) -> Iterator[MatchedPairs]:
        """The pairs of a part, batch by batch."""
        with self.dataset.parquet(part.file) as file:
            for batch in file.iter_batches(_BATCH_ROWS, part.row_groups, columns=["user", "item"]):
                user, item = (batch[name].to_numpy().astype(np.int64) for name in ("user", "item"))
                yield MatchedPairs(user, item, users.take(user), items.take(item), Counter(rows=len(user)))


def open_source(
    run: TrainedRun, given: Sequence[str | AnyPath], user: str = "user", item: str = "item", part_rows: int = PART_ROWS
) -> PairSource:
    """The input that `given` names: the run's own data set (its unclear exposures), or files of raw pairs."""
    if len(given) == 1 and (path_as_given(given[0]) / DATASET_FILE).is_file():
        dataset = Dataset.open(str(given[0]))
        if dataset.fingerprint != run.dataset.fingerprint:
            raise UserError(
                f"{given[0]} is another data set than the one {run.folder} was trained on, so its indices mean other "
                "users and items: give its pairs by raw ids, as CSV or parquet"
            )
        return UnclearPairs(dataset, part_rows)
    return FilePairs(given, user, item, part_rows)


def read_users(file: str | AnyPath, column: str) -> pa.Array:
    """The raw user ids in a column of a CSV or parquet file, as they are there."""
    path = find_files([path_as_given(file)])[0]
    _check_columns(path, {"user": column})
    batches = read_columns(path, [column], {column: pa.string()})
    found = [canonical(batch.rename_columns(["user"]), path)["user"] for batch in batches]
    return pa.concat_arrays(found) if found else pa.array([], pa.string())


def _check_columns(file: AnyPath, columns: dict[str, str]) -> None:
    names = column_names(file)
    for name, column in columns.items():
        if column not in names:
            raise UserError(
                f"{file}: column {column} is missing; it has {', '.join(names)} "
                f"(--{name}-column NAME says which one is the {name})"
            )


def _group_rows(file: AnyPath) -> list[int]:
    try:
        with open_parquet(file) as parquet:
            return _rows_of_groups(parquet.metadata)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file} cannot be read: {str(error).splitlines()[0]}") from error


def _rows_of_groups(metadata: pq.FileMetaData) -> list[int]:
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def _packed(rows: Sequence[int], part_rows: int) -> list[tuple[int, ...]]:
    """Neighbouring row groups together, up to `part_rows` rows a part; a larger group is a part of its own."""
    parts: list[tuple[int, ...]] = []
    filled = part_rows
    for group, count in enumerate(rows):
        if filled + count > part_rows or not parts:
            parts.append(())
            filled = 0
        parts[-1] += (group,)
        filled += count
    return parts


def _division(parts: Sequence[InputPart]) -> str:
    """Distinguishes one division of an input into parts from another."""
    return hashlib.sha256(repr([part.row_groups for part in parts]).encode()).hexdigest()[:16]
