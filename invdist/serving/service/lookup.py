"""Raw ids to indices for small requests: the work grows with the request, not with the catalogue."""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa

from invdist.serving.raw_ids import UNKNOWN, RawIds


class SortedIds(RawIds):
    """Raw ids with a sorted array of their keys beside them, which processes can share.

    `RawIds.indices` builds a hash table of all ids at each call. The key of a number is the number; that of a text is a
    hash of 64 bits, and the text itself is compared too.
    """

    def __init__(self, raw: pa.Array) -> None:
        super().__init__(raw)
        keys = _keys(raw)
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]

    def indices(self, ids: pa.Array) -> np.ndarray:
        """Indices (int64) of ids in the data set's type; `UNKNOWN` for nulls and ids it does not have."""
        found = np.full(len(ids), UNKNOWN, np.int64)
        valid = np.flatnonzero(ids.is_valid().to_numpy(zero_copy_only=False))
        given = ids.drop_null()
        keys = _keys(given)
        first, end = (np.searchsorted(self._keys, keys, side) for side in ("left", "right"))
        hit = np.flatnonzero(first < end)
        if pa.types.is_integer(self.type):
            found[valid[hit]] = self._order[first[hit]]
            return found
        for place in hit:
            for candidate in self._order[first[place] : end[place]]:
                if self.raw[int(candidate)].as_py() == given[int(place)].as_py():
                    found[valid[place]] = candidate
        return found


def _keys(ids: pa.Array) -> np.ndarray:
    if pa.types.is_integer(ids.type):
        return ids.to_numpy(zero_copy_only=False).astype(np.int64)
    digests = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in ids.to_pylist())
    return np.frombuffer(digests, np.int64)
