"""Reads columns of CSV (plain or gzip) and parquet files, and gives them our types."""

from __future__ import annotations

import codecs
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from invdist.data.prepare.raw_log import LABELS, SIGNALS
from invdist.runtime.errors import UserError
from invdist.runtime.paths import AnyPath

BLOCK_BYTES = 16 << 20
_BATCH_ROWS = 1 << 18
_CSV_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
NO_TIME = int(np.iinfo(np.int64).min)
"""The time of a row that has none: before all others."""


class CsvFormat(NamedTuple):
    """How CSV files are written. Without a delimiter it is a comma, or a tab in .tsv files."""

    delimiter: str | None = None
    encoding: str = "utf-8"

    def parsing(self, file: AnyPath) -> pacsv.ParseOptions:
        """pyarrow's options for a file."""
        return pacsv.ParseOptions(delimiter=self.delimiter or ("\t" if ".tsv" in file.suffixes else ","))


class Piece(NamedTuple):
    """A part of a log file that can be read alone: row groups [start, stop) of a parquet file, or the lines of a CSV
    file that begin in bytes [start, stop). Without a stop it is the whole file."""

    file: AnyPath
    start: int = 0
    stop: int | None = None


def pieces_of(file: AnyPath, csv: CsvFormat, rows: int, size: int) -> list[Piece]:
    """A file in pieces of about `rows` rows (parquet) or `size` bytes (CSV); gzip cannot be cut."""
    if file.suffix == ".parquet":
        with user_errors(file), open_parquet(file) as parquet:
            metadata = parquet.metadata
            counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        edges, seen = [0], 0
        for group, count in enumerate(counts):
            if seen and seen + count > rows:
                edges, seen = [*edges, group], 0
            seen += count
        edges.append(len(counts))
    elif file.suffix == ".gz" or not _newline_is_a_byte(csv.encoding):
        return [Piece(file)]
    else:
        total = file.stat().st_size
        edges = [*range(0, max(total - size // 2, 1), size), total]
    return [Piece(file)] if len(edges) <= 2 else [Piece(file, *edge) for edge in pairwise(edges)]


def _newline_is_a_byte(encoding: str) -> bool:
    """Whether the byte 10 is a newline and nothing else."""
    return codecs.lookup(encoding).name in ("utf-8", "ascii", "iso8859-1", "cp1252")


def find_files(inputs: Sequence[AnyPath], *patterns: str) -> list[AnyPath]:
    """The log files named by `inputs`. A folder means the CSV and parquet files in it that match one of `patterns`."""
    patterns = patterns or ("*",)
    files: list[AnyPath] = []
    for path in inputs:
        if path.is_dir():
            matching = {file for pattern in patterns for file in path.glob(pattern) if _is_log(file)}
            if not matching:
                raise UserError(f"{path} has no {' or '.join(patterns)} file that is CSV or parquet")
            files += sorted(matching)
        elif path.is_file():
            files.append(path)
        else:
            raise UserError(f"{path} is not there")
    seen: set[AnyPath] = set()
    for file in files:
        if file.resolve() in seen:
            raise UserError(f"{file} is given twice; its rows would count as repeated")
        seen.add(file.resolve())
        if not file.stat().st_size:
            raise UserError(f"{file} is empty; expected a header and rows")
    return files


def _is_log(file: AnyPath) -> bool:
    return file.name.endswith((*_CSV_SUFFIXES, ".parquet"))


def column_names(file: AnyPath, csv: CsvFormat = CsvFormat()) -> list[str]:  # noqa: B008
    """The columns of a CSV or parquet file. With a delimiter given, a file of any other name is CSV."""
    with user_errors(file):
        if file.suffix == ".parquet":
            with open_parquet(file) as parquet:
                return parquet.schema_arrow.names
        if not (csv.delimiter or _is_log(file)):
            raise UserError(
                f"{file}: expected a name that ends in {', '.join(_CSV_SUFFIXES)} or .parquet "
                "(delimiter=CHARACTER reads any name as CSV)"
            )
        with open_stream(file) as stream:
            reading = pacsv.ReadOptions(encoding=csv.encoding)
            return pacsv.open_csv(stream, reading, csv.parsing(file)).schema.names


def find_column(wanted: str, names: Sequence[str], file: AnyPath) -> str | None:
    """The column called `wanted`, or else the only one of that name in another case; None if there is none."""
    if wanted in names:
        return wanted
    alike = [name for name in names if name.strip().casefold() == wanted.strip().casefold()]
    if len(alike) > 1:
        raise UserError(f"{file}: column {wanted} could be {' or '.join(alike)}; write it as the file does")
    return alike[0] if alike else None


def read_columns(
    file: AnyPath,
    columns: Sequence[str],
    types: Mapping[str, pa.DataType],
    row_groups: Sequence[int] | None = None,
    csv: CsvFormat = CsvFormat(),  # noqa: B008
    lines: tuple[int, int] | None = None,
    begins_empty: Mapping[str, pa.DataType] = {},
) -> Iterator[pa.RecordBatch]:
    """Some columns of a CSV or parquet file, batch by batch; `types` are those of a CSV's columns, others are inferred
    from its beginning. `begins_empty` are those of columns of which nothing is there yet.

    `row_groups` are those of a parquet file to read, `lines` the bytes of a CSV file in which the lines to read begin;
    by default all are read. Text is taken as it is: empty text is not null,
    and neither is NA. In columns of numbers both are.
    """
    with user_errors(file):
        if file.suffix == ".parquet":
            with open_parquet(file) as parquet:
                for batch in parquet.iter_batches(_BATCH_ROWS, row_groups, columns=list(columns)):
                    yield batch.select(list(columns))
            return
        reading = pacsv.ReadOptions(block_size=BLOCK_BYTES, encoding=csv.encoding)
        converting = pacsv.ConvertOptions(include_columns=list(columns), column_types=dict(types))
        if lines is not None or begins_empty:
            with open_stream(file) as stream:
                begin = pacsv.open_csv(stream, reading, csv.parsing(file), converting).schema
            inferred = dict(zip(begin.names, begin.types))
            empty = {name: kind for name, kind in begins_empty.items() if pa.types.is_null(inferred[name])}
            converting.column_types = {**inferred, **types, **empty}
        if lines is None:
            with open_stream(file) as stream:
                yield from pacsv.open_csv(stream, reading, csv.parsing(file), converting)
            return
        if lines[0]:
            reading.column_names = column_names(file, csv)
        start, stop = (_line_start(file, at) for at in lines)
        if start < stop:
            with _open_anywhere(file) as source, source.get_stream(start, stop - start) as stream:
                yield from pacsv.open_csv(stream, reading, csv.parsing(file), converting)


def _line_start(file: AnyPath, at: int) -> int:
    """Where the first line that begins at byte `at` or later begins."""
    if not at:
        return 0
    with _open_anywhere(file) as source:
        at -= 1
        while part := source.read_at(1 << 16, at):
            if (newline := part.find(b"\n")) >= 0:
                return at + newline + 1
            at += len(part)
        return at


def canonical(batch: pa.RecordBatch, file: AnyPath) -> pa.RecordBatch:
    """The batch with our column types: signals float64, time and date int64, ids whole numbers or text.

    An id that is null or empty text becomes null, a time that is null `NO_TIME`. A date becomes days since 1970.
    """
    columns = {}
    for name in batch.schema.names:
        column = batch[name]
        if name in ("user", "item"):
            columns[name] = _ids(column, name, file)
        elif name == "time":
            columns[name] = pc.fill_null(_times(column, file), NO_TIME)
        elif name == "date":
            columns[name] = _dates(column, file)
        elif name in SIGNALS:
            columns[name] = pc.fill_null(_numbers(column, name, file), float("nan"))
    return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))


def _ids(column: pa.Array, name: str, file: AnyPath) -> pa.Array:
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _ids(column.dictionary_decode(), name, file)
    if pa.types.is_integer(kind):
        return column.cast(pa.int64())
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        text = column.cast(pa.string())
        empty = pc.call_function("equal", [text, pa.scalar("")])
        return pc.call_function("if_else", [empty, pa.scalar(None, pa.string()), text])
    if pa.types.is_null(kind):
        return column.cast(pa.int64())
    raise UserError(f"{file}: {name} ids are {kind}; expected whole numbers or text: store the column as one of these")


def _numbers(column: pa.Array, name: str, file: AnyPath) -> pa.Array:
    kind = column.type
    if pa.types.is_null(kind):
        return column.cast(pa.float64())
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise UserError(f"{file}: {name.replace('_', ' ')} is {kind}; expected numbers")
    numbers = column.cast(pa.float64(), safe=False)
    if name in LABELS:
        values = numbers.to_numpy(zero_copy_only=False)
        wrong = values[~(np.isnan(values) | (values == 0) | (values == 1))]
        if len(wrong):
            raise UserError(f"{file}: {name} is {wrong[0]:g}; expected 1 (positive), 0 (negative) or nothing (unclear)")
    return numbers


def _times(column: pa.Array, file: AnyPath) -> pa.Array:
    kind = column.type
    if pa.types.is_floating(kind):
        return column.cast(pa.int64(), safe=False)
    if pa.types.is_integer(kind) or pa.types.is_null(kind):
        return column.cast(pa.int64())
    if is_calendar(kind):
        # Files of one log may have seconds, days or nanoseconds: pyarrow infers what fits each file.
        unit = pa.timestamp("us", kind.tz if pa.types.is_timestamp(kind) else None)
        return column.cast(unit, safe=False).cast(pa.int64())
    raise UserError(f"{file}: time is {kind}; expected whole numbers or timestamps")


def is_calendar(kind: pa.DataType) -> bool:
    """Whether a column's type is a date or a timestamp."""
    return pa.types.is_timestamp(kind) or pa.types.is_date(kind)


def _dates(column: pa.Array, file: AnyPath) -> pa.Array:
    kind = column.type
    if pa.types.is_integer(kind):
        digits = column.cast(pa.string())
        try:
            column = pc.call_function("strptime", [digits], pc.StrptimeOptions("%Y%m%d", "s"))
        except pa.ArrowInvalid as error:
            raise UserError(f"{file}: date has a number that is no date; expected YYYYMMDD, as in 20220425") from error
    elif not (is_calendar(kind) or pa.types.is_null(kind)):
        raise UserError(f"{file}: date is {kind}; expected dates (2022-04-25) or whole numbers YYYYMMDD")
    days = column.cast(pa.date32(), safe=False).cast(pa.int32()).cast(pa.int64())
    return pc.fill_null(days, NO_TIME)


_SECONDS, _MILLISECONDS, _MICROSECONDS = 10**11, 10**14, 10**17
"""Times below these are in seconds, milliseconds, microseconds; larger ones in nanoseconds. Right from 1973 to 5138."""


def days_of(time: np.ndarray, utc_offset: float) -> np.ndarray:
    """Days since 1970 (int64) of times since 1970 in any unit; `utc_offset` hours are added first. `NO_TIME` stays."""
    size = np.abs(np.maximum(time, NO_TIME + 1))
    per_hour = 3600 * np.select([size < _SECONDS, size < _MILLISECONDS, size < _MICROSECONDS], [1, 10**3, 10**6], 10**9)
    shifted = time // per_hour + (time % per_hour) / per_hour + utc_offset
    return np.where(time == NO_TIME, NO_TIME, np.floor(shifted / 24)).astype(np.int64)


def open_stream(file: AnyPath) -> pa.NativeFile:
    """The bytes of a file, unpacked if it is gzip."""
    return pa.input_stream(_open_anywhere(file), compression="gzip" if file.suffix == ".gz" else None)


def open_parquet(file: AnyPath) -> pq.ParquetFile:
    """A parquet file; of one in an object store, the columns that are read are fetched ahead."""
    return pq.ParquetFile(file) if isinstance(file, Path) else pq.ParquetFile(file.open(), pre_buffer=True)


def _open_anywhere(file: AnyPath) -> pa.NativeFile:
    """A file to read at any position."""
    return pa.OSFile(str(file)) if isinstance(file, Path) else file.open()


@contextmanager
def user_errors(file: AnyPath) -> Iterator[None]:
    """Turns what pyarrow, gzip and zip say about a bad file into a message that names it."""
    try:
        yield
    except UserError:
        raise
    except (pa.ArrowException, zipfile.BadZipFile, EOFError, UnicodeError) as error:
        message = str(error).split("\n")[0]
        hint = ""
        if "conversion error to int64" in message:
            hint = " (id_type=string reads ids as text)"
        elif "UTF8" in message or "UTF-8" in message or isinstance(error, UnicodeError):
            hint = " (encoding=NAME reads other encodings, such as latin-1)"
        raise UserError(f"{file} cannot be read: {message}{hint}") from error
    except OSError as error:
        raise UserError(f"{file} cannot be read: {str(error).splitlines()[0]}") from error
