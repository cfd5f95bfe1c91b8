"""Pairs to be scored, in parts that can be read one by one, in any order and by any process.

A part is a range of row groups of a parquet file, or a whole CSV file (which cannot be entered in the middle). The
parts of an input depend on its files and on `part_rows` alone, so that an interrupted work finds its place again.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from invdist.data.dataset import Dataset
from invdist.data.prepare.readers import canonical, column_names, find_files, read_columns
from invdist.runtime.errors import UserError
from invdist.serving.ids import UNKNOWN, RawIds

PART_ROWS = 1 << 20
_BATCH_ROWS = 1 << 18
COUNTS = ("rows", "unreadable", "unknown_users", "unknown_items")
"""Rows met; rows without ids or with ids of the wrong kind; rows whose user, or item, the data set does not have."""


class Pairs(NamedTuple):
    """Rows of an input: indices (int64, `UNKNOWN` where there is none) and raw ids in the data set's type."""

    user: np.ndarray
    item: np.ndarray
    raw_user: pa.Array
    raw_item: pa.Array
    counts: Counter[str]

    def where(self, mask: np.ndarray) -> Pairs:
        """Some of the rows; the counts stay."""
        chosen = pa.array(mask)
        return Pairs(
            self.user[mask], self.item[mask], self.raw_user.filter(chosen), self.raw_item.filter(chosen), self.counts
        )


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of work: some row groups of a parquet file, or all of a CSV file."""

    name: str
    """`part-00000`, as the output's file will be called."""
    file: str
    """An absolute path, or a file of the data set: workers may be at home elsewhere."""
    row_groups: tuple[int, ...] | None = None


class Source(Protocol):
    """An input: its parts, and the pairs of each."""

    parts: list[Part]

    def identity(self) -> list[Any]:
        """What tells this input from another one."""
        ...

    def read(self, part: Part, users: RawIds, items: RawIds) -> Iterator[Pairs]:
        """The pairs of a part, those with unreadable ids left out."""
        ...


class FilePairs:
    """Pairs of raw ids in CSV or parquet files (a `Source`)."""

    def __init__(
        self, inputs: Sequence[str | Path], user: str = "user", item: str = "item", part_rows: int = PART_ROWS
    ) -> None:
        self.columns = {"user": user, "item": item}
        self.files = find_files([Path(path) for path in inputs])
        pieces: list[tuple[Path, tuple[int, ...] | None]] = []
        for file in self.files:
            _check_columns(file, self.columns)
            groups = _packed(_group_rows(file), part_rows) if file.suffix == ".parquet" else [None]
            pieces += [(file, group) for group in groups]
        self.parts = [Part(f"part-{n:05d}", str(file.absolute()), groups) for n, (file, groups) in enumerate(pieces)]

    def identity(self) -> list[Any]:
        """Names, sizes and times of the files, and their columns."""
        stats = [(file.name, file.stat()) for file in self.files]
        return [self.columns, *([name, stat.st_size, stat.st_mtime_ns] for name, stat in stats), _cut(self.parts)]

    def read(self, part: Part, users: RawIds, items: RawIds) -> Iterator[Pairs]:
        """The pairs of a part, those with unreadable ids left out."""
        file = Path(part.file)
        text = dict.fromkeys(self.columns.values(), pa.string())
        for batch in read_columns(file, list(self.columns.values()), text, part.row_groups):
            batch = canonical(batch.rename_columns(list(self.columns)), file)
            yield match(batch["user"], batch["item"], users, items)


class UnclearPairs:
    """The unclear exposures of the run's own prepared data set (a `Source`)."""

    def __init__(self, dataset: Dataset, part_rows: int = PART_ROWS) -> None:
        self.dataset = dataset
        self.parts = []
        for shard in dataset.shards("unclear"):
            with dataset.parquet(shard["file"]) as file:
                metadata = file.metadata
                rows = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
            for groups in _packed(rows, part_rows):
                self.parts.append(Part(f"part-{len(self.parts):05d}", shard["file"], groups))

    def identity(self) -> list[Any]:
        """The content of the data set."""
        return [self.dataset.fingerprint, _cut(self.parts)]

    def read(self, part: Part, users: RawIds, items: RawIds) -> Iterator[Pairs]:
        """The pairs of a part; all are known."""
        with self.dataset.parquet(part.file) as file:
            for batch in file.iter_batches(_BATCH_ROWS, part.row_groups, columns=["user", "item"]):
                user, item = (batch[name].to_numpy().astype(np.int64) for name in ("user", "item"))
                yield Pairs(user, item, users.take(user), items.take(item), Counter(rows=len(user)))


def _cut(parts: Sequence[Part]) -> str:
    """Tells one division of an input into parts from another."""
    return hashlib.sha256(repr([part.row_groups for part in parts]).encode()).hexdigest()[:16]


def match(user: pa.Array, item: pa.Array, users: RawIds, items: RawIds) -> Pairs:
    """Raw ids as indices. Rows whose ids are missing, or cannot be ids of this data set, are counted and left out."""
    user, item = users.cast(user), items.cast(item)
    pairs = Pairs(users.indices(user), items.indices(item), user, item, Counter(rows=len(user)))
    readable = user.is_valid().to_numpy(zero_copy_only=False) & item.is_valid().to_numpy(zero_copy_only=False)
    if not readable.all():
        pairs.counts["unreadable"] = int(np.count_nonzero(~readable))
        pairs = pairs.where(readable)
    pairs.counts["unknown_users"] = int(np.count_nonzero(pairs.user == UNKNOWN))
    pairs.counts["unknown_items"] = int(np.count_nonzero(pairs.item == UNKNOWN))
    return pairs


def read_users(file: str | Path, column: str, users: RawIds) -> tuple[np.ndarray, list[str]]:
    """The users named in a CSV or parquet file: their indices (each once, in order of the file), and unknown ones."""
    path = find_files([Path(file)])[0]
    _check_columns(path, {"user": column})
    indices, unknown = [], []
    for batch in read_columns(path, [column], {column: pa.string()}):
        raw = canonical(batch.rename_columns(["user"]), path)["user"]
        found = users.indices(users.cast(raw))
        indices.append(found)
        unknown += raw.filter(pa.array(found == UNKNOWN)).cast(pa.string()).to_pylist()
    found = np.concatenate(indices) if indices else np.empty(0, np.int64)
    return _distinct(found[found != UNKNOWN]), [str(raw) for raw in unknown]


def _distinct(values: np.ndarray) -> np.ndarray:
    _, first = np.unique(values, return_index=True)
    return values[np.sort(first)]


def _check_columns(file: Path, columns: dict[str, str]) -> None:
    names = column_names(file)
    for name, column in columns.items():
        if column not in names:
            raise UserError(
                f"{file}: column {column} is missing; it has {', '.join(names)} "
                f"(--{name}-column NAME says which one is the {name})"
            )


def _group_rows(file: Path) -> list[int]:
    try:
        metadata = pq.read_metadata(file)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file} cannot be read: {str(error).splitlines()[0]}") from error
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
