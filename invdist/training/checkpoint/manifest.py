"""What a checkpoint says of itself: `manifest.json`, written last, believed only after every check here.

A *tensor* is a whole one (a table, a weight), whichever ranks held it; its *parts* are the rectangles that were
written, each one tensor of one file. So a checkpoint does not depend on how many ranks wrote it, nor on sharding.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from invdist.embeddings.tables import Table
from invdist.runtime.errors import UserError
from invdist.runtime.files import is_plain_name
from invdist.training.checkpoint.safetensors import DTYPES

MANIFEST = "manifest.json"
VERSION = 1
_FORMAT = "invdist checkpoint"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST = 1 << 48  # beyond any count of rows or bytes, well inside 64 bits


class DamagedCheckpoint(UserError):
    """A checkpoint that is not what was written: an older one may be whole."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where training stands: the next step to take, and the steps taken so far."""

    epoch: int = 0
    phase: int = 0
    """Index of the phase within the epoch."""
    pass_index: int = 0
    """Index of the pass over the phase's rows."""
    step: int = 0
    """Steps taken in this pass."""
    global_step: int = 0
    """Steps taken since the beginning."""


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangle of a tensor seen as a matrix, and where it is: tensor `key` of `file`."""

    file: str
    key: str
    row: int
    rows: int
    column: int
    columns: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A whole tensor: the parts cover it exactly."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        """Rows of the tensor seen as a matrix."""
        return self.shape[0] if self.shape else 1

    @property
    def columns(self) -> int:
        """Columns of the tensor seen as a matrix."""
        return math.prod(self.shape[1:])

    def part_shape(self, part: Part) -> tuple[int, ...]:
        """The shape that a part has in its file."""
        if not self.shape:
            return ()
        return (part.rows, *self.shape[1:]) if part.columns == self.columns else (part.rows, part.columns)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What a file must be."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that a checkpoint holds."""

    position: Position
    metric: float | None
    """The metric to keep the best by, larger is better; None if it was not measured."""
    extra: dict[str, Any]
    strategy: str
    world_size: int
    sharding: dict[str, str]
    optimizer: str
    optimizer_steps: int
    """Updates that the optimizer of rows has made."""
    tables: tuple[Table, ...]
    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]


def dump(content: Mapping[str, Any]) -> bytes:
    """The JSON of a manifest with the fields of `Manifest` as plain data."""
    return json.dumps({"format": _FORMAT, "version": VERSION, **content}, separators=(",", ":")).encode()


def parse(text: bytes, where: str) -> Manifest:
    """The checked manifest in `text`; a `DamagedCheckpoint` says what is wrong with the one at `where`."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{where} is not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise DamagedCheckpoint(f"{where} does not describe an invdist checkpoint")
    if content.get("version") != VERSION:
        raise UserError(
            f"{where}: version {_short(content.get('version'))}, but this invdist reads version {VERSION}; "
            "resume with the invdist that wrote it"
        )
    return _Parser(where).manifest(content)


class _Parser:
    """Turns JSON into a manifest and believes nothing."""

    def __init__(self, where: str) -> None:
        self.where = where

    def manifest(self, content: dict[str, Any]) -> Manifest:
        metric = self._get(content, "metric", (float, type(None)))
        files = {name: self._file(name, entry) for name, entry in self._get(content, "files", (dict,)).items()}
        manifest = Manifest(
            position=Position(
                **{
                    field.name: self._count(self._get(content, "position", (dict,)), field.name, "position.")
                    for field in dataclasses.fields(Position)
                }
            ),
            metric=metric,
            extra=self._get(content, "extra", (dict,)),
            strategy=self._get(content, "strategy", (str,)),
            world_size=self._count(content, "world_size"),
            sharding=self._get(content, "sharding", (dict,)),
            optimizer=self._get(content, "optimizer", (str,)),
            optimizer_steps=self._count(content, "optimizer_steps"),
            tables=tuple(self._table(entry) for entry in self._get(content, "tables", (list,))),
            tensors={
                name: self._tensor(name, entry, files) for name, entry in self._get(content, "tensors", (dict,)).items()
            },
            files=files,
        )
        for table in manifest.tables:
            entry = manifest.tensors.get(f"rows/{table.name}/weight")
            if entry is None or entry.shape != (table.rows, table.columns):
                self._fail(f"table {table.name}: {table.rows} x {table.columns} rows are not what its tensors hold")
        return manifest

    def _file(self, name: str, entry: Any) -> FileEntry:
        if not is_plain_name(name):
            self._fail(f"file {_short(name)}: a file of a checkpoint lies in its folder, under a plain name")
        digest = self._get(entry, "sha256", (str,), f"files.{name}.")
        if not _SHA256.fullmatch(digest):
            self._fail(f"files.{name}.sha256 is {_short(digest)}; expected 64 hexadecimal digits")
        return FileEntry(self._count(entry, "bytes", f"files.{name}."), digest)

    def _table(self, entry: Any) -> Table:
        name = self._get(entry, "name", (str,), "tables.")
        return Table(name, self._count(entry, "rows", "tables."), self._count(entry, "columns", "tables."))

    def _tensor(self, name: str, entry: Any, files: dict[str, FileEntry]) -> TensorEntry:
        prefix = f"tensors.{_short(name)}."
        dtype = self._get(entry, "dtype", (str,), prefix)
        if dtype not in DTYPES:
            self._fail(f"{prefix}dtype is {_short(dtype)}; expected one of {', '.join(DTYPES)}")
        shape = self._get(entry, "shape", (list,), prefix)
        if len(shape) > 8 or not all(type(size) is int and 0 <= size <= _MOST for size in shape):
            self._fail(f"{prefix}shape is {_short(shape)}; expected sizes")
        parts = tuple(self._part(part, prefix) for part in self._get(entry, "parts", (list,), prefix))
        tensor = TensorEntry(dtype, tuple(shape), parts)
        self._check_cover(tensor, prefix)
        for part in parts:
            if part.file not in files:
                self._fail(f"{prefix}parts: {_short(part.file)} is not among the files")
            # What a file cannot hold is refused before anybody makes room for it.
            if part.rows * part.columns * DTYPES[dtype].itemsize > files[part.file].bytes:
                self._fail(f"{prefix}parts: {part.rows} x {part.columns} values do not fit {part.file}")
        return tensor

    def _part(self, entry: Any, prefix: str) -> Part:
        prefix += "parts."
        numbers = {name: self._count(entry, name, prefix) for name in ("row", "rows", "column", "columns")}
        return Part(self._get(entry, "file", (str,), prefix), self._get(entry, "key", (str,), prefix), **numbers)

    def _check_cover(self, tensor: TensorEntry, prefix: str) -> None:
        """The parts are stripes of columns, each cut into rows, without a gap or an overlap."""
        if tensor.rows * tensor.columns == 0:
            return
        stripes: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for part in tensor.parts:
            stripes.setdefault((part.column, part.columns), []).append((part.row, part.rows))
        if not _covers(stripes, tensor.columns) or not all(_covers(s, tensor.rows) for s in stripes.values()):
            self._fail(f"{prefix}parts do not cover shape {list(tensor.shape)} exactly")

    def _get(self, mapping: Any, name: str, kinds: tuple[type, ...], prefix: str = "") -> Any:
        if not isinstance(mapping, dict):
            self._fail(f"{prefix.rstrip('.')} is {_short(mapping)}; expected a mapping")
        value = mapping.get(name)
        if name not in mapping or type(value) not in kinds:
            expected = " or ".join(kind.__name__ for kind in kinds)
            self._fail(f"{prefix}{name} is {_short(value) if name in mapping else 'missing'}; expected {expected}")
        return value

    def _count(self, mapping: Any, name: str, prefix: str = "") -> int:
        value = self._get(mapping, name, (int,), prefix)
        if not 0 <= value <= _MOST:
            self._fail(f"{prefix}{name} is {_short(value)}; expected 0 or more, and a size that can be")
        return value

    def _fail(self, message: str) -> NoReturn:
        raise DamagedCheckpoint(f"{self.where}: {message}")


def _covers(spans: Iterable[tuple[int, int]], size: int) -> bool:
    """Whether spans (start, length) lie end to end from 0 to `size`."""
    end = 0
    for start, length in sorted(spans):
        if start != end or length == 0:
            return False
        end += length
    return end == size


def _short(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = "a huge number"
    return text if len(text) <= 60 else text[:57] + "..."
