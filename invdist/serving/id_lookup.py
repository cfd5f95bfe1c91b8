"""Looks raw ids up among many others: the work of a call grows with what is asked, not with how many there are."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from invdist.data import hashing
from invdist.serving.raw_ids import UNKNOWN, RawIds, pc

_WORD = hashing.key("raw id")
_LETTER = hashing.key("letter of a raw id")


def words(ids: pa.Array) -> np.ndarray:
    """A random word (uint64) of each id; `ids` are int64 or string without nulls. Distinct for distinct numbers."""
    if pa.types.is_integer(ids.type):
        return hashing.mix(_WORD, ids.to_numpy())
    if not len(ids):
        return np.empty(0, np.uint64)
    offsets = np.frombuffer(ids.buffers()[1], np.int32)[ids.offset : ids.offset + len(ids) + 1]
    letters = np.frombuffer(ids.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]].astype(np.uint64)
    offsets = (offsets - offsets[0]).astype(np.int64)
    place = np.arange(len(letters)) - np.repeat(offsets[:-1], np.diff(offsets))
    # A sum over letters, each times a random number of its place: what wraps around does not matter.
    sums = np.append(np.uint64(0), np.cumsum((letters + np.uint64(1)) * hashing.mix(_LETTER, place)))
    return hashing.mix(_WORD, sums[offsets[1:]] - sums[offsets[:-1]])


class IdLookup:
    """Where ids are among those whose words are given, and whose `text` too if they are no numbers."""

    def __init__(self, word: np.ndarray, text: pa.Array | None) -> None:
        self._order = np.argsort(word, kind="stable")
        self._words = word[self._order]
        self._text = text
        starts = np.flatnonzero(np.append(True, self._words[1:] != self._words[:-1]))
        self._longest = int(np.diff(np.append(starts, len(self._words))).max(initial=0))

    def places(self, ids: pa.Array) -> np.ndarray:
        """The place (int64) of each id, none of them null; -1 for those that are not there."""
        asked = words(ids)
        found = np.full(len(ids), -1)
        at = np.searchsorted(self._words, asked)
        for _ in range(self._longest):  # once, unless two ids have the same word
            same = at < len(self._words)
            same[same] = self._words[at[same]] == asked[same]
            rows = np.flatnonzero(same)
            if self._text is not None:
                equal = pc.equal(self._text.take(pa.array(self._order[at[rows]])), ids.take(pa.array(rows)))
                rows = rows[equal.to_numpy(zero_copy_only=False)]
            found[rows] = self._order[at[rows]]
            at += 1
        return found


class SortedIds(RawIds):
    """Raw ids for small requests: `RawIds.indices` builds a hash table of all ids at each call."""

    def __init__(self, raw: pa.Array) -> None:
        super().__init__(raw)
        self._lookup = IdLookup(words(raw), None if pa.types.is_integer(raw.type) else raw)

    def indices(self, ids: pa.Array) -> np.ndarray:
        """Indices (int64) of ids in the data set's type; `UNKNOWN` for nulls and ids it does not have."""
        if not ids.null_count:
            return self._lookup.places(ids)
        found = np.full(len(ids), UNKNOWN, np.int64)
        found[ids.is_valid().to_numpy(zero_copy_only=False)] = self._lookup.places(ids.drop_null())
        return found
