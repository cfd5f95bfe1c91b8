"""Raw logs in files: any CSV or parquet log with named columns, KuaiRand's files, MovieLens-1M."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv

from invdist.data.prepare.raw_log import SIGNALS
from invdist.data.prepare.readers import (
    BLOCK_BYTES,
    NO_TIME,
    CsvFormat,
    Piece,
    canonical,
    column_names,
    days_of,
    find_column,
    find_files,
    is_calendar,
    open_stream,
    pieces_of,
    read_columns,
    user_errors,
)
from invdist.runtime.errors import UserError
from invdist.runtime.paths import AnyPath

_MEASURED = ("play_time", "duration", "rating")


class MappedIds:
    """What all logs in files have in common: ids that have to be mapped, and no known truth."""

    has_truth = False
    looks = False

    def universe(self) -> None:
        """None: ids have to be mapped."""
        return

    def latent(self) -> dict[str, pa.Table]:
        """Nothing is known beyond the log."""
        return {}

    def look(self, piece: Any) -> Any:
        """Nothing has to be known before reading."""
        return

    def after_look(self, found: Sequence[Any]) -> None:
        """Nothing has to be known before reading."""


class FileLog(MappedIds):
    """A log in CSV or parquet files (a `RawLog`). `columns` maps our names to those in the files.

    `user`, `item` and `needed` must be there. `time` is read if it is there, and must be if its name is not the one in
    `usual`. With `utc_offset`, rows get their `day`: that of the column `date` in files that have it, else that of the
    time plus so many hours. With `id_type` "string" ids of CSV files are text; otherwise they are numbers if all are.
    `factors` multiply signals.
    """

    def __init__(
        self,
        kind: str,
        files: Sequence[AnyPath],
        columns: Mapping[str, str],
        needed: Sequence[str],
        *,
        id_type: str = "auto",
        csv: CsvFormat = CsvFormat(),  # noqa: B008
        usual: Mapping[str, str] | None = None,
        utc_offset: float | None = None,
        factors: Mapping[str, float] | None = None,
    ) -> None:
        self.kind, self.files, self.id_type, self.csv = kind, list(files), id_type, csv
        self.utc_offset, self.factors = utc_offset, dict(factors or {})
        self.has_day = utc_offset is not None
        self.looks = id_type != "string" and any(file.suffix != ".parquet" for file in self.files)
        self.times: dict[str, AnyPath] = {}
        """Of which kinds the times are that were read, each with a file that has it."""
        self._id_types: dict[str, pa.DataType] = {"user": pa.string(), "item": pa.string()}
        self.columns = {name: columns[name] for name in ("user", "item", *needed)}
        usual = usual or {"time": "time", "date": "date"}
        optional = {name: columns[name] for name in ("time", *(["date"] if self.has_day else []))}
        self._found = {file: self._find_columns(file, optional, usual) for file in self.files}
        untimed = [file for file in self.files if "time" not in self._found[file]]
        self.has_time = not untimed
        if self.has_time:
            self.columns["time"] = columns["time"]
        elif len(untimed) < len(self.files):
            raise UserError(f"{untimed[0]}: column {columns['time']} is missing here, but other files have it")
        elif self.has_day and (undated := [file for file in untimed if "date" not in self._found[file]]):
            raise UserError(
                f"{undated[0]}: split=date needs a column {columns['time']} or {columns['date']}; "
                "columns.time=NAME or columns.date=NAME names it"
            )

    def describe(self) -> dict[str, Any]:
        """The kind, files (names only: a data set may be moved) and columns."""
        return {"kind": self.kind, "files": [file.name for file in self.files], "columns": self.columns}

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows of all files in turn."""
        if self.looks:
            self.after_look([self.look(Piece(file)) for file in self.files])
        for file in self.files:
            yield from self.read(Piece(file))

    def pieces(self, rows: int, size: int) -> list[Piece]:
        """The files, cut where they are large."""
        return [piece for file in self.files for piece in pieces_of(file, self.csv, rows, size)]

    def look(self, piece: Piece) -> dict[str, Any] | None:
        """Of what types the ids of a piece of CSV are."""
        text = ("user", "item")
        if piece.file.suffix == ".parquet":
            return None
        found = {name: _IdType() for name in text}
        names = [self._found[piece.file][name] for name in text]
        for batch in self._read(piece, names, dict.fromkeys(names, pa.string())):
            for column, kind in zip(batch.columns, found.values(), strict=True):
                kind.see(column)
            if all(kind.text for kind in found.values()):
                break
        return {name: (kind.text, kind.odd, str(piece.file)) for name, kind in found.items()}

    def after_look(self, found: Sequence[dict[str, Any] | None]) -> None:
        """Decides how to read the ids of CSV files: a log has ids of one type."""
        for name in self._id_types:
            self._id_types[name] = _id_type(name, [piece[name] for piece in found if piece is not None])

    def read(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        """The rows of a piece."""
        file = piece.file
        found = self._found[file]
        types = {found[name]: pa.float64() for name in _MEASURED if name in found}
        types |= {found[name]: kind for name, kind in self._id_types.items()}
        empty = {found[name]: pa.float64() for name in SIGNALS if name in found and name not in _MEASURED}
        with user_errors(file):
            for batch in self._read(piece, list(found.values()), types, empty):
                batch = batch.rename_columns(list(found))
                if self.has_time:
                    _note_time(self.times, batch["time"].type, file)
                yield self._complete(canonical(batch, file), file)

    def _read(
        self,
        piece: Piece,
        names: list[str],
        types: dict[str, pa.DataType],
        empty: Mapping[str, pa.DataType] = {},
    ) -> Iterator[pa.RecordBatch]:
        if piece.stop is None:
            return read_columns(piece.file, names, types, csv=self.csv, begins_empty=empty)
        if piece.file.suffix == ".parquet":
            return read_columns(piece.file, names, types, range(piece.start, piece.stop))
        return read_columns(piece.file, names, types, csv=self.csv, lines=(piece.start, piece.stop), begins_empty=empty)

    def _find_columns(self, file: AnyPath, optional: Mapping[str, str], usual: Mapping[str, str]) -> dict[str, str]:
        """The names that the columns have in this file."""
        names = column_names(file, self.csv)
        found = {}
        for name, column in {**self.columns, **optional}.items():
            actual = find_column(column, names, file)
            if actual is not None:
                found[name] = actual
            elif name not in optional or column != usual[name]:
                raise UserError(
                    f"{file}: column {column} is missing; it has {', '.join(names)} "
                    f"(columns.{name}=NAME says which one is the {name.replace('_', ' ')})"
                )
        return found

    def _complete(self, batch: pa.RecordBatch, file: AnyPath) -> pa.RecordBatch:
        """The batch with units converted and, if wanted, days."""
        columns = dict(zip(batch.schema.names, batch.columns))
        for name, factor in self.factors.items():
            if name in columns:
                columns[name] = pa.array(columns[name].to_numpy() * factor)
        date = columns.pop("date", None)
        if self.utc_offset is not None:
            if date is None:
                date = pa.array(days_of(columns["time"].to_numpy(), self.utc_offset))
            columns["day"] = date
        return pa.RecordBatch.from_pydict(columns)


_WHOLE = re.compile(r"0|-?[1-9]\d{0,18}", re.ASCII)  # longer ones need more than 64 bits
_DECIMAL = re.compile(r"-?((0|[1-9]\d*)(\.\d*)?|\.\d+)(e[-+]?\d+)?", re.ASCII | re.IGNORECASE)


class _IdType:
    """Whether ids are whole numbers or text, from all of them.

    One id that is no number, or that starts with a zero (00012), makes all of them text. If all are numbers, but some
    are not whole or need more than 64 bits, it is an error: reading them as numbers would make several ids one.
    """

    def __init__(self) -> None:
        self.text = False
        self.odd: str | None = None

    def see(self, column: pa.Array) -> None:
        """Looks at some ids, as text."""
        for value in [] if self.text else map(str.strip, column.unique().to_pylist()):
            if not value or (_WHOLE.fullmatch(value) and -(2**63) <= int(value) < 2**63):
                continue
            if not _DECIMAL.fullmatch(value):
                self.text = True
                return
            self.odd = self.odd or value


def _id_type(name: str, found: Sequence[tuple[bool, str | None, str]]) -> pa.DataType:
    """The type of ids, from what an `_IdType` found in each piece of the log: (text, odd, file)."""
    if any(text for text, _, _ in found):
        return pa.string()
    for _, odd, file in found:
        if odd is not None:
            raise UserError(
                f"{file}: {name} id {odd} is not a whole number of 64 bits; id_type=string reads ids as text"
            )
    return pa.int64()


class KuaiRandLog(FileLog):
    """KuaiRand's files: `log_*` as published, and `exposures_*`, which have an order (`seq`) instead of times.

    Rows of exposures files come before all timed rows, on the training side of any split by time or date. They have no
    play times: only the rule long_view can label them.
    """

    _FIRST_DAY_MS = 1_649_376_000_000  # 8 April 2022, when KuaiRand's recording began
    _COLUMNS = {
        "user": "user_id",
        "item": "video_id",
        "play_time": "play_time_ms",
        "duration": "duration_ms",
        "like": "is_like",
        "hate": "is_hate",
        "long_view": "long_view",
        "time": "time_ms",
        "date": "date",
    }

    def __init__(self, inputs: Sequence[AnyPath], needed: Sequence[str], utc_offset: float | None) -> None:
        # Folders: exposures are taken where the rule can use them.
        patterns = ["log_*", "exposures_*"] if set(needed) == {"long_view"} else ["log_*"]
        files = find_files(inputs, *patterns)
        super().__init__("kuairand", files, self._COLUMNS, needed, usual=self._COLUMNS, utc_offset=utc_offset)

    def _find_columns(self, file: AnyPath, optional: Mapping[str, str], usual: Mapping[str, str]) -> dict[str, str]:
        if not _is_exposures(file):
            return super()._find_columns(file, optional, usual)
        if set(self.columns) - {"user", "item", "long_view"}:
            raise UserError(f"{file} has no play times; only rule=long_view can label exposures files")
        return super()._find_columns(file, {"time": "seq"}, {"time": ""})

    def _complete(self, batch: pa.RecordBatch, file: AnyPath) -> pa.RecordBatch:
        if not _is_exposures(file):
            return super()._complete(batch, file)
        columns = dict(zip(batch.schema.names, batch.columns))
        columns["time"] = pa.array(columns["time"].to_numpy() * 60_000 + self._FIRST_DAY_MS)
        if self.has_day:
            columns["day"] = pa.repeat(NO_TIME, batch.num_rows)
        return pa.RecordBatch.from_pydict(columns)


def _is_exposures(file: AnyPath) -> bool:
    return file.name.startswith("exposures_")


class Ml1mLog(MappedIds):
    """`ratings.dat` of MovieLens-1M (a `RawLog`): the file, the folder that has it, or the published zip."""

    has_time = True

    def __init__(self, path: AnyPath, utc_offset: float | None = None) -> None:
        self.path = find_files([path / "ratings.dat" if path.is_dir() else path])[0]
        self.utc_offset, self.has_day = utc_offset, utc_offset is not None

    def describe(self) -> dict[str, Any]:
        """The file that was read."""
        return {"kind": "ml-1m", "files": [self.path.name]}

    def pieces(self, rows: int, size: int) -> list[Piece]:
        """The one file, whole."""
        return [Piece(self.path)]

    def read(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        """The ratings."""
        return self.batches()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The ratings."""
        # Fields are separated by two colons; with one colon as the delimiter every second field is empty.
        fields = ["user", "", "item", "", "rating", "", "time"]
        names = [field or f"_{position}" for position, field in enumerate(fields)]
        types = {"user": pa.int64(), "item": pa.int64(), "rating": pa.float64(), "time": pa.int64()}
        with user_errors(self.path), self._open() as stream:
            for batch in pacsv.open_csv(
                stream,
                pacsv.ReadOptions(column_names=names, block_size=BLOCK_BYTES),
                pacsv.ParseOptions(delimiter=":", quote_char=False),
                pacsv.ConvertOptions(include_columns=list(types), column_types=types),
            ):
                batch = canonical(batch, self.path)
                if self.utc_offset is not None:
                    batch = batch.append_column("day", pa.array(days_of(batch["time"].to_numpy(), self.utc_offset)))
                yield batch

    @contextmanager
    def _open(self) -> Iterator[Any]:
        if self.path.suffix != ".zip":
            with open_stream(self.path) as stream:
                yield stream
            return
        with self.path.open("rb") as file, zipfile.ZipFile(file) as archive:  # type: ignore[arg-type]
            names = [name for name in archive.namelist() if name.rsplit("/", 1)[-1] == "ratings.dat"]
            if not names:
                raise UserError(f"{self.path} has no ratings.dat; expected the published ml-1m.zip")
            with archive.open(names[0]) as member:
                yield pa.PythonFile(member, mode="r")


def _note_time(times: dict[str, AnyPath], kind: pa.DataType, file: AnyPath) -> None:
    """Remembers of what type a file's times are."""
    if not pa.types.is_null(kind):
        note_times(times, {"timestamps" if is_calendar(kind) else "numbers": file})


def note_times(times: dict[str, AnyPath], more: Mapping[str, AnyPath]) -> None:
    """Adds kinds of times, each with a file that has it; `UserError` if those of one log are not comparable."""
    for kind, file in more.items():
        times.setdefault(kind, file)
    if len(times) > 1:
        (one, here), (other, there) = times.items()
        raise UserError(f"time is {one} in {here} and {other} in {there}; expected the same in all files")
