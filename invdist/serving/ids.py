"""From raw ids to the indices of a data set and back, whatever type the raw ids of an input have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

pc: Any = pyarrow.compute  # most of its functions are made when it is imported, unseen by type checkers

UNKNOWN = -1
"""The index of an id that the data set does not have."""

_WHOLE_NUMBER = r"^\s*[+-]?\d{1,19}\s*$"
_LARGEST = 2**63 - 1


class RawIds:
    """The raw ids of users or of items, in the order of their indices."""

    def __init__(self, name: str, raw: pa.Array) -> None:
        self.name, self.raw = name, raw

    def __len__(self) -> int:
        return len(self.raw)

    def cast(self, given: pa.Array) -> pa.Array:
        """Given ids in the type of the data set's; null where they cannot be such an id, or are missing.

        A CSV does not say whether its ids are numbers or text, so text that is a whole number is one where the data
        set has numbers, and numbers are text where it has text.
        """
        wanted = self.raw.type
        if given.type == wanted:
            return given
        if pa.types.is_integer(wanted) and pa.types.is_string(given.type):
            fits = pc.match_substring_regex(given, _WHOLE_NUMBER)
            trimmed = pc.utf8_trim_whitespace(pc.if_else(fits, given, None))
            number = pc.utf8_ltrim(trimmed, "+").cast(pa.decimal128(20))  # 19 digits may be more than an int64 holds
            return pc.if_else(pc.less_equal(pc.abs(number), pa.scalar(_LARGEST)), number, None).cast(wanted)
        return given.cast(wanted)

    def indices(self, ids: pa.Array) -> np.ndarray:
        """Indices (int64) of ids that went through `cast`; `UNKNOWN` for those the data set does not have."""
        found = pc.index_in(ids, value_set=self.raw, skip_nulls=True)
        return pc.fill_null(found, UNKNOWN).to_numpy(zero_copy_only=False).astype(np.int64)

    def take(self, indices: np.ndarray) -> pa.Array:
        """The raw ids of indices."""
        return self.raw.take(pa.array(indices, pa.int64()))
