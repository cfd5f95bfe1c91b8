"""What a checkpoint says about itself: `manifest.json`, written last, and used only after every check here.

A *tensor* is a whole one (a table, a weight), whichever ranks held it. Its *parts* are the rectangles that were
written, each one tensor of one file. So a checkpoint does not depend on how many ranks wrote it, nor on sharding.

A *delta* names a full checkpoint beside it, its `base`, and has only those rows of the tables that changed since.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import torch
from annotated_types import Ge, Le
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from invdist.config.plain_yaml import shown
from invdist.embeddings.tables import Table
from invdist.runtime.errors import UserError
from invdist.runtime.files import is_plain_name

MANIFEST = "manifest.json"
VERSION, DELTA_VERSION = 1, 2
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The types a tensor can have, by their names in safetensors files."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FORMAT = "invdist checkpoint"


class DamagedCheckpoint(UserError):
    """A checkpoint that is not what was written; an older one may be intact."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where training continues: the next step to take, and how many were taken."""

    epoch: int = 0
    phase: int = 0
    """Index of the phase within the epoch."""
    pass_index: int = 0
    """Index of the pass over the rows of the phase."""
    step: int = 0
    """Steps taken in this pass."""
    global_step: int = 0
    """Steps taken since the beginning."""


def _plain(name: str) -> str:
    if not is_plain_name(name):
        raise ValueError("a file of a checkpoint lies in its folder, under a plain name")
    return name


Size = Annotated[int, Ge(0), Le(1 << 48)]  # beyond any count of rows or bytes, well inside 64 bits
FileName = Annotated[str, AfterValidator(_plain)]
Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Entry(BaseModel):
    """No conversions; keys that this version does not know are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class PositionEntry(_Entry):
    """A `Position`, none of its numbers left out."""

    epoch: Size
    phase: Size
    pass_index: Size
    step: Size
    global_step: Size


class Part(_Entry):
    """A rectangle of a tensor seen as a matrix, and where it is: tensor `key` of `file`."""

    file: str
    key: str
    row: Size
    rows: Size
    column: Size
    columns: Size


class ChangedRows(_Entry):
    """Rows of a tensor seen as a matrix that differ from the base: tensor `key` of `file`.

    Their row numbers, ascending, are tensor `index` of the same file.
    """

    file: str
    key: str
    index: str
    rows: Size
    column: Size
    columns: Size


class TensorEntry(_Entry):
    """A whole tensor: the parts cover it exactly, or `changed` says which rows of the base's tensor are replaced."""

    dtype: Literal[*DTYPES]  # pyright: ignore[reportInvalidTypeForm]
    shape: Annotated[tuple[Size, ...], Field(max_length=8)]
    parts: tuple[Part, ...]
    changed: tuple[ChangedRows, ...] | None = None
    multiplier: Annotated[int, Ge(1), Le(1 << 48)] = 1
    """Row `id` of the tensor is stored as row `id * multiplier % rows` (`Layout.multipliers`)."""

    @property
    def rows(self) -> int:
        """Rows of the tensor seen as a matrix."""
        return self.shape[0] if self.shape else 1

    @property
    def columns(self) -> int:
        """Columns of the tensor seen as a matrix."""
        return math.prod(self.shape[1:])

    def part_shape(self, part: Part | ChangedRows) -> tuple[int, ...]:
        """The shape that a part has in its file."""
        if not self.shape:
            return ()
        return (part.rows, *self.shape[1:]) if part.columns == self.columns else (part.rows, part.columns)

    @model_validator(mode="after")
    def _check_cover(self) -> Self:
        """The parts are stripes of columns, each cut into rows, without a gap or an overlap."""
        if self.multiplier > 1 and (self.rows * self.multiplier > 1 << 62 or math.gcd(self.multiplier, self.rows) > 1):
            raise ValueError(f"rows of shape {list(self.shape)} cannot be spread by {self.multiplier}")
        if self.changed is not None:
            inside = all(c.rows <= self.rows and c.column + c.columns <= self.columns for c in self.changed)
            if self.parts or not inside:
                raise ValueError(f"changed rows do not fit shape {list(self.shape)}")
            return self
        if self.rows * self.columns == 0:
            return self
        stripes: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for part in self.parts:
            stripes.setdefault((part.column, part.columns), []).append((part.row, part.rows))
        if not _covers(stripes, self.columns) or not all(_covers(s, self.rows) for s in stripes.values()):
            raise ValueError(f"parts do not cover shape {list(self.shape)} exactly")
        return self


class FileEntry(_Entry):
    """What a file must be."""

    bytes: Size
    sha256: Checksum


class Base(_Entry):
    """The full checkpoint that a delta needs: the name of its folder, beside the delta's, and its manifest's hash."""

    name: FileName
    sha256: Checksum


class Manifest(_Entry):
    """All that a checkpoint holds."""

    saved_position: PositionEntry = Field(alias="position")
    metric: Annotated[float, Field(allow_inf_nan=False)] | None
    """The metric to keep the best by, larger is better; None if it was not measured."""
    extra: dict[str, Any]
    """What the caller of `save` gave."""
    strategy: str
    world_size: Size
    sharding: dict[str, Any]
    optimizer: str
    optimizer_steps: Size
    """Updates that the optimizer of embeddings has made."""
    tables: tuple[Table, ...]
    files: dict[FileName, FileEntry]
    tensors: dict[str, TensorEntry]
    base: Base | None = None
    """The full checkpoint that this delta needs; None: this is a full one."""

    @property
    def position(self) -> Position:
        """Where training continues."""
        return Position(**self.saved_position.model_dump())

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        for name, tensor in self.tensors.items():
            if tensor.changed is not None and self.base is None:
                raise ValueError(f"tensors.{shown(name)}: changed rows, but no base that has the others")
            for part in (*tensor.parts, *(tensor.changed or ())):
                if part.file not in self.files:
                    raise ValueError(f"tensors.{shown(name)}: {shown(part.file)} is not among the files")
                # What a file cannot hold is refused before memory is allocated for it.
                if part.rows * part.columns * DTYPES[tensor.dtype].itemsize > self.files[part.file].bytes:
                    size = f"{part.rows} x {part.columns}"
                    raise ValueError(f"tensors.{shown(name)}: {size} values do not fit {part.file}")
        for table in self.tables:
            entry = self.tensors.get(f"rows/{table.name}/weight")
            if entry is None or entry.shape != (table.rows, table.columns):
                size = f"{table.rows} x {table.columns}"
                raise ValueError(f"table {shown(table.name)}: its tensors do not hold {size} values")
        return self


def dump(content: Mapping[str, Any]) -> bytes:
    """The JSON of a manifest with the fields of `Manifest` as plain data."""
    spread = any("multiplier" in tensor for tensor in content["tensors"].values())
    version = DELTA_VERSION if content.get("base") or spread else VERSION
    return json.dumps({"format": _FORMAT, "version": version, **content}, separators=(",", ":")).encode()


def parse(text: bytes, where: str) -> Manifest:
    """The checked manifest in `text`; a `DamagedCheckpoint` says what is wrong with the one at `where`."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{where} is not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise DamagedCheckpoint(f"{where} does not describe an invdist checkpoint")
    if content.get("version") not in (VERSION, DELTA_VERSION):
        raise UserError(
            f"{where}: version {shown(content.get('version'))}, but this invdist reads versions {VERSION} and "
            f"{DELTA_VERSION}; resume with the invdist that wrote it"
        )
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part)[:60] for part in first["loc"] if part != "[key]")
        message = f"{first['msg'].removeprefix('Value error, ')} (found {shown(first['input'])})"
        raise DamagedCheckpoint(": ".join(part for part in (where, place, message) if part)) from error


def _covers(spans: Iterable[tuple[int, int]], size: int) -> bool:
    """Whether spans (start, length) lie end to end from 0 to `size`."""
    end = 0
    for start, length in sorted(spans):
        if start != end or length == 0:
            return False
        end += length
    return end == size
