"""Raw ids divided among workers: one knows the ids of its range of indices, and the indices of its share of the ids.

The share of an id is a hash of it, so whoever looks an id up knows whom to ask.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from invdist.data import hashing
from invdist.serving.raw_ids import UNKNOWN, pc

_WORD = hashing.key("raw id")
_LETTER = hashing.key("letter of a raw id")


def words(ids: pa.Array) -> np.ndarray:
    """A random word (uint64) of each id; `ids` are int64 or string without nulls. Distinct for distinct numbers."""
    if pa.types.is_integer(ids.type):
        return hashing.mix(_WORD, ids.to_numpy())
    offsets = np.frombuffer(ids.buffers()[1], np.int32)[ids.offset : ids.offset + len(ids) + 1]
    content = ids.buffers()[2]
    if content is None or not len(ids):
        return np.zeros(len(ids), np.uint64)
    letters = np.frombuffer(content, np.uint8)[offsets[0] : offsets[-1]].astype(np.uint64)
    offsets = (offsets - offsets[0]).astype(np.int64)
    place = np.arange(len(letters)) - np.repeat(offsets[:-1], np.diff(offsets))
    # A sum over letters, each times a random number of its place: what wraps around does not matter.
    sums = np.append(np.uint64(0), np.cumsum((letters + np.uint64(1)) * hashing.mix(_LETTER, place)))
    return hashing.mix(_WORD, sums[offsets[1:]] - sums[offsets[:-1]])


def share_of(ids: pa.Array, shares: int) -> np.ndarray:
    """Which of `shares` equal shares each id belongs to (int64)."""
    return (words(ids) % np.uint64(shares)).astype(np.int64)


class IdShare:
    """The indices of one share of all ids."""

    def __init__(self, batches: Iterable[pa.Array], share: int, shares: int) -> None:
        """Reads all ids, given in the order of their indices, and keeps those of the share."""
        kept_words, kept_index, kept_ids, first = [], [], [], 0
        for ids in batches:
            word = words(ids)
            mine = np.flatnonzero((word % np.uint64(shares)).astype(np.int64) == share)
            kept_words.append(word[mine])
            kept_index.append(first + mine)
            # The word of a number is enough to recognize it.
            kept_ids.append(None if pa.types.is_integer(ids.type) else ids.take(pa.array(mine)))
            first += len(ids)
        word = np.concatenate([*kept_words, np.empty(0, np.uint64)])
        order = np.argsort(word)
        self._words = word[order]
        self._index = np.concatenate([*kept_index, np.empty(0, np.int64)])[order]
        text = [ids for ids in kept_ids if ids is not None]
        self._ids = pa.concat_arrays(text).take(pa.array(order)) if text else None
        starts = np.flatnonzero(np.append(True, self._words[1:] != self._words[:-1]))
        self._longest = int(np.diff(np.append(starts, len(self._words))).max(initial=0))

    def indices(self, ids: pa.Array) -> np.ndarray:
        """Indices (int64) of ids of this share without nulls; `UNKNOWN` for those that do not exist."""
        asked = words(ids)
        found = np.full(len(ids), UNKNOWN)
        at = np.searchsorted(self._words, asked)
        for _ in range(self._longest):  # once, unless two ids have the same word
            same = at < len(self._words)
            same[same] = self._words[at[same]] == asked[same]
            rows = np.flatnonzero(same)
            if self._ids is not None:
                equal = pc.equal(self._ids.take(pa.array(at[rows])), ids.take(pa.array(rows)))
                rows = rows[equal.to_numpy(zero_copy_only=False)]
            found[rows] = self._index[at[rows]]
            at += 1
        return found
