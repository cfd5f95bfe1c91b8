"""Maps raw ids of any type to dense indices, and keeps the way back."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from invdist.data import hashing
from invdist.runtime.errors import UserError

MOST = 2**31 - 1
"""Distinct ids of an entity: indices are 32-bit."""


class IdMap:
    """Gives raw ids provisional indices as they arrive, and final ones, in the order of the raw ids, at the end.

    The final index does not depend on the order of the log. Memory grows with distinct ids, not with rows.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._index: dict[object, int] = {}
        self._type: pa.DataType | None = None
        self._words = np.empty(0, np.uint64)

    def __len__(self) -> int:
        return len(self._index)

    def provisional(self, raw: pa.Array) -> np.ndarray:
        """Indices (int32) of raw ids, new ids entered; `raw` holds no nulls."""
        self._type = same_type(self.name, self._type, raw.type)
        encoded = raw.dictionary_encode()
        index, known = self._index, len(self._index)
        values = encoded.dictionary.to_pylist()
        mapped = np.fromiter((index.setdefault(value, len(index)) for value in values), np.int32, len(values))
        new = [hashing.key(value) for value, at in zip(values, mapped.tolist()) if at >= known]
        self._words = np.concatenate([self._words, np.array(new, np.uint64)])
        if len(index) > MOST:
            raise UserError(f"more than {MOST} distinct {self.name} ids; indices are 32-bit")
        return mapped[encoded.indices.to_numpy(zero_copy_only=False)]

    def words(self, provisional: np.ndarray) -> np.ndarray:
        """A random word (uint64) of each id, made of the raw id alone: independent of the order of the log."""
        return self._words[provisional]

    def known_text(self, raw: list[str]) -> np.ndarray:
        """Provisional indices (int64) of ids written as text, -1 where the id was never entered."""
        return np.array([self._index.get(value, -1) for value in ids_of_text(raw, self._type)], np.int64)

    def finish(self) -> tuple[np.ndarray, pa.Table]:
        """(final index of each provisional index as int32, table `index: int64, raw` in the order of `index`)."""
        raw = pa.array(list(self._index), self._type or pa.int64())
        ordered = pa.table({"raw": raw, "provisional": np.arange(len(raw))}).sort_by("raw")
        final = np.empty(len(raw), np.int32)
        final[ordered["provisional"].to_numpy()] = np.arange(len(raw), dtype=np.int32)
        return final, id_table(ordered["raw"].combine_chunks())


def same_type(name: str, known: pa.DataType | None, kind: pa.DataType) -> pa.DataType:
    """The type of a log's ids, of which `known` was seen before; `UserError` if `kind` is another."""
    if known is not None and known != kind:
        raise UserError(
            f"{name} ids are {known} in one part of the log and {kind} in another; "
            "use one type in all files (id_type=string reads CSV ids as text)"
        )
    return kind


def ids_of_text(raw: list[str], kind: pa.DataType | None) -> list[object]:
    """Ids of a type, written as text; None for what cannot be one."""
    if kind is None or not pa.types.is_integer(kind):
        return list(raw)
    return [int(value) if value.lstrip("-").isdigit() else None for value in raw]


def id_table(raw: pa.Array) -> pa.Table:
    """The mapping table of raw ids, given in the order of their indices."""
    return pa.table({"index": pa.array(np.arange(len(raw)), pa.int64()), "raw": raw})
