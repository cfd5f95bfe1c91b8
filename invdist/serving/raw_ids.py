"""Raw ids to the indices of a data set and back, whatever type the raw ids of an input have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

pc: Any = pyarrow.compute  # its functions are generated at import, unseen by type checkers

UNKNOWN = -1
"""The index of an id that the data set does not have."""

_WHOLE_NUMBER = r"^\s*[+-]?\d{1,19}\s*$"
_LARGEST = 2**63 - 1


class RawIds:
    """The raw ids of users or of items, ordered by index."""

    def __init__(self, raw: pa.Array) -> None:
        self.raw = raw

    def __len__(self) -> int:
        return len(self.raw)

    @property
    def type(self) -> pa.DataType:
        """int64 or string."""
        return self.raw.type

    def cast(self, given: pa.Array) -> pa.Array:
        """Given ids in the type of the data set's; null where they are missing or cannot be such an id.

        A CSV does not say whether its ids are numbers or text. So text that is a whole number becomes one where the
        data set has numbers, and numbers become text where it has text.
        """
        if given.type == self.type:
            return given
        if pa.types.is_integer(self.type) and pa.types.is_string(given.type):
            fits = pc.match_substring_regex(given, _WHOLE_NUMBER)
            trimmed = pc.utf8_trim_whitespace(pc.if_else(fits, given, None))
            number = pc.utf8_ltrim(trimmed, "+").cast(pa.decimal128(20))  # 19 digits may be more than an int64 holds
            return pc.if_else(pc.less_equal(pc.abs(number), pa.scalar(_LARGEST)), number, None).cast(self.type)
        return given.cast(self.type)

    def indices(self, ids: pa.Array) -> np.ndarray:
        """Indices (int64) of ids in the data set's type; `UNKNOWN` for nulls and ids it does not have."""
        found = pc.index_in(ids, value_set=self.raw, skip_nulls=True)
        return pc.fill_null(found, UNKNOWN).to_numpy(zero_copy_only=False).astype(np.int64)

    def take(self, indices: np.ndarray) -> pa.Array:
        """The raw ids of indices."""
        return self.raw.take(pa.array(indices, pa.int64()))
