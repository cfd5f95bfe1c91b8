"""Raw ids divided among workers: one knows the ids of its range of indices, and the indices of its share of the ids.

The share of an id is a hash of it, so whoever looks an id up knows whom to ask.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from invdist.serving.id_lookup import IdLookup, words
from invdist.serving.raw_ids import UNKNOWN


def share_of(ids: pa.Array, shares: int) -> np.ndarray:
    """Which of `shares` equal shares each id belongs to (int64)."""
    return (words(ids) % np.uint64(shares)).astype(np.int64)


class IdShare:
    """The indices of one share of all ids."""

    def __init__(self, batches: Iterable[pa.Array], share: int, shares: int) -> None:
        """Reads all ids, given in the order of their indices, and keeps those of the share."""
        kept_words, kept_index, kept_ids, first = [np.empty(0, np.uint64)], [np.empty(0, np.int64)], [], 0
        for ids in batches:
            word = words(ids)
            mine = np.flatnonzero((word % np.uint64(shares)).astype(np.int64) == share)
            kept_words.append(word[mine])
            kept_index.append(first + mine)
            # The word of a number is enough to recognize it.
            kept_ids += [] if pa.types.is_integer(ids.type) else [ids.take(pa.array(mine))]
            first += len(ids)
        text = pa.concat_arrays(kept_ids) if kept_ids else None
        self._lookup = IdLookup(np.concatenate(kept_words), text)
        self._index = np.concatenate(kept_index)

    def indices(self, ids: pa.Array) -> np.ndarray:
        """Indices (int64) of ids of this share without nulls; `UNKNOWN` for those that do not exist."""
        places = self._lookup.places(ids)
        found = np.full(len(ids), UNKNOWN)
        found[places >= 0] = self._index[places[places >= 0]]
        return found
