"""Readers of raw logs in files: CSV (plain or gzip) and parquet, with the columns named by the user."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from invdist.data.prepare.log import SIGNALS
from invdist.runtime.errors import UserError

_BLOCK_BYTES = 16 << 20
_BATCH_ROWS = 1 << 18
_CSV_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
_MEASURED = ("play_time", "duration", "rating")


def find_files(inputs: Sequence[Path], pattern: str = "*") -> list[Path]:
    """The log files named by `inputs`; a folder stands for those in it that match `pattern`."""
    files: list[Path] = []
    for path in inputs:
        if path.is_dir():
            inside = sorted(file for file in path.glob(pattern) if _is_log(file))
            if not inside:
                raise UserError(f"{path} holds no {pattern} file that is CSV or parquet")
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise UserError(f"{path} is not there")
    seen: set[Path] = set()
    for file in files:
        if file.resolve() in seen:
            raise UserError(f"{file} is given twice; its rows would be counted as repeated")
        seen.add(file.resolve())
        if not file.stat().st_size:
            raise UserError(f"{file} is empty; expected a header and rows")
    return files


def _is_log(file: Path) -> bool:
    return file.name.endswith((*_CSV_SUFFIXES, ".parquet"))


class FileLog:
    """A log in CSV or parquet files (a `RawLog`). `columns` maps our names to those in the files.

    `user`, `item` and `needed` must be there, and `time` if it has another name than the usual one; otherwise it is
    taken if it is there. With `id_type` "string" ids of CSV files are read as text, otherwise their type is inferred.
    """

    has_truth = False

    def __init__(
        self,
        kind: str,
        files: Sequence[Path],
        columns: Mapping[str, str],
        needed: Sequence[str],
        id_type: str = "auto",
        usual_time: str = "time",
    ) -> None:
        self.kind, self.files, self.id_type = kind, list(files), id_type
        self.columns = {name: columns[name] for name in ("user", "item", *needed)}
        missing_time = [file for file in self.files if columns["time"] not in column_names(file)]
        self.has_time = not missing_time
        if self.has_time or columns["time"] != usual_time:
            self.columns["time"] = columns["time"]
        elif len(missing_time) < len(self.files):
            raise UserError(f"{missing_time[0]}: column {columns['time']} is missing here, but other files have it")
        for file in self.files:
            self._check_columns(file)

    def describe(self) -> dict[str, Any]:
        """The kind, files (names only: a data set may travel) and columns."""
        return {"kind": self.kind, "files": [file.name for file in self.files], "columns": self.columns}

    def universe(self) -> None:
        """Ids are to be mapped."""
        return

    def latent(self) -> dict[str, pa.Table]:
        """Nothing is known beyond the log."""
        return {}

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows of all files in turn."""
        times: dict[str, Path] = {}
        for file in self.files:
            with _user_errors(file):
                for batch in self._read(file):
                    batch = batch.rename_columns(list(self.columns))
                    if self.has_time:
                        _note_time(times, batch["time"].type, file)
                    yield canonical(batch, file)

    def _read(self, file: Path) -> Iterator[pa.RecordBatch]:
        types = {self.columns[name]: pa.float64() for name in _MEASURED if name in self.columns}
        if self.id_type == "string":
            types |= {self.columns[name]: pa.string() for name in ("user", "item")}
        return read_columns(file, list(self.columns.values()), types)

    def _check_columns(self, file: Path) -> None:
        names = column_names(file)
        for name, column in self.columns.items():
            if column not in names:
                raise UserError(
                    f"{file}: column {column} is missing; it has {', '.join(names)} "
                    f"(columns.{name}=NAME says which one is the {name.replace('_', ' ')})"
                )


def column_names(file: Path) -> list[str]:
    """The columns of a CSV or parquet file."""
    with _user_errors(file):
        if file.suffix == ".parquet":
            return pq.read_schema(file).names
        if not _is_log(file):
            raise UserError(f"{file}: expected a name that ends in {', '.join(_CSV_SUFFIXES)} or .parquet")
        with _open(file) as stream:
            parse = pacsv.ParseOptions(delimiter=_delimiter(file))
            return pacsv.open_csv(stream, parse_options=parse).schema.names


def read_columns(
    file: Path, columns: Sequence[str], types: Mapping[str, pa.DataType], row_groups: Sequence[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """Some columns of a CSV or parquet file, batch by batch; `types` are those of a CSV's columns, others are inferred.

    `row_groups` are those of a parquet file to read, by default all.
    """
    with _user_errors(file):
        if file.suffix == ".parquet":
            with pq.ParquetFile(file) as parquet:
                for batch in parquet.iter_batches(_BATCH_ROWS, row_groups, columns=list(columns)):
                    yield batch.select(list(columns))
            return
        with _open(file) as stream:
            yield from pacsv.open_csv(
                stream,
                pacsv.ReadOptions(block_size=_BLOCK_BYTES),
                pacsv.ParseOptions(delimiter=_delimiter(file)),
                pacsv.ConvertOptions(include_columns=list(columns), column_types=dict(types), strings_can_be_null=True),
            )


class Ml1mLog:
    """`ratings.dat` of MovieLens-1M (a `RawLog`), by itself, in a folder or inside the published zip."""

    has_time = True
    has_truth = False

    def __init__(self, path: Path) -> None:
        self.path = find_files([path / "ratings.dat" if path.is_dir() else path])[0]

    def describe(self) -> dict[str, Any]:
        """The file that was read."""
        return {"kind": "ml-1m", "files": [self.path.name]}

    def universe(self) -> None:
        """Ids are to be mapped: they have gaps."""
        return

    def latent(self) -> dict[str, pa.Table]:
        """Nothing is known beyond the log."""
        return {}

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The ratings."""
        # Fields are separated by two colons; with one colon as the delimiter every second field is an empty one.
        fields = ["user", "", "item", "", "rating", "", "time"]
        names = [field or f"_{position}" for position, field in enumerate(fields)]
        types = {"user": pa.int64(), "item": pa.int64(), "rating": pa.float64(), "time": pa.int64()}
        with _user_errors(self.path), self._open() as stream:
            for batch in pacsv.open_csv(
                stream,
                pacsv.ReadOptions(column_names=names, block_size=_BLOCK_BYTES),
                pacsv.ParseOptions(delimiter=":", quote_char=False),
                pacsv.ConvertOptions(include_columns=list(types), column_types=types),
            ):
                yield canonical(batch, self.path)

    @contextmanager
    def _open(self) -> Iterator[Any]:
        if self.path.suffix != ".zip":
            with _open(self.path) as stream:
                yield stream
            return
        with zipfile.ZipFile(self.path) as archive:
            names = [name for name in archive.namelist() if name.rsplit("/", 1)[-1] == "ratings.dat"]
            if not names:
                raise UserError(f"{self.path} holds no ratings.dat; expected the published ml-1m.zip")
            with archive.open(names[0]) as member:
                yield pa.PythonFile(member, mode="r")


def canonical(batch: pa.RecordBatch, file: Path) -> pa.RecordBatch:
    """The batch with our column types: signals float64, time int64; ids must be whole numbers or text."""
    columns = {}
    for name in batch.schema.names:
        column = batch[name]
        if name in ("user", "item"):
            columns[name] = _ids(column, name, file)
        elif name == "time":
            columns[name] = pc.fill_null(_times(column, file), np.iinfo(np.int64).min)
        elif name in SIGNALS:
            columns[name] = pc.fill_null(_numbers(column, name, file), float("nan"))
    return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))


def _ids(column: pa.Array, name: str, file: Path) -> pa.Array:
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _ids(column.dictionary_decode(), name, file)
    if pa.types.is_integer(kind):
        return column.cast(pa.int64())
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return column.cast(pa.string())
    if pa.types.is_null(kind):
        return column.cast(pa.int64())
    raise UserError(f"{file}: {name} ids are {kind}; expected whole numbers or text")


def _numbers(column: pa.Array, name: str, file: Path) -> pa.Array:
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return column.cast(pa.float64(), safe=False)
    if pa.types.is_null(kind):
        return column.cast(pa.float64())
    raise UserError(f"{file}: {name.replace('_', ' ')} is {kind}; expected numbers")


def _times(column: pa.Array, file: Path) -> pa.Array:
    kind = column.type
    if pa.types.is_floating(kind):
        return column.cast(pa.int64(), safe=False)
    if pa.types.is_integer(kind) or pa.types.is_null(kind):
        return column.cast(pa.int64())
    if _is_calendar(kind):
        # Files of one log may hold seconds, days or nanoseconds, as pyarrow guessed or their writers liked.
        unit = pa.timestamp("us", kind.tz if pa.types.is_timestamp(kind) else None)
        return column.cast(unit, safe=False).cast(pa.int64())
    raise UserError(f"{file}: time is {kind}; expected whole numbers or timestamps")


def _is_calendar(kind: pa.DataType) -> bool:
    return pa.types.is_timestamp(kind) or pa.types.is_date(kind)


def _note_time(times: dict[str, Path], kind: pa.DataType, file: Path) -> None:
    """Notes what a file's times are; those of one log must be comparable."""
    if not pa.types.is_null(kind):
        times.setdefault("timestamps" if _is_calendar(kind) else "numbers", file)
    if len(times) > 1:
        (one, here), (other, there) = times.items()
        raise UserError(f"time is {one} in {here} and {other} in {there}; expected the same in all files")


def _delimiter(file: Path) -> str:
    return "\t" if ".tsv" in file.suffixes else ","


def _open(file: Path) -> pa.NativeFile:
    return pa.input_stream(str(file), compression="gzip" if file.suffix == ".gz" else None)


@contextmanager
def _user_errors(file: Path) -> Iterator[None]:
    """Turns what pyarrow, gzip and zip say about a bad file into a message that names it."""
    try:
        yield
    except UserError:
        raise
    except (pa.ArrowException, zipfile.BadZipFile, EOFError, UnicodeDecodeError) as error:
        message = str(error).split("\n")[0]
        hint = " (id_type=string reads ids as text)" if "conversion error to int64" in message else ""
        raise UserError(f"{file} cannot be read: {message}{hint}") from error
    except OSError as error:
        raise UserError(f"{file} cannot be read: {str(error).splitlines()[0]}") from error
