"""Raw ids looked up in sorted words, against a hash table."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invdist.serving import id_lookup
from invdist.serving.id_lookup import SortedIds, words
from invdist.serving.raw_ids import RawIds

_numbers = st.integers(-(2**63), 2**63 - 1)
_texts = st.text(max_size=5)


@settings(max_examples=50, deadline=None)
@given(st.one_of(*(st.tuples(st.sets(kind), st.lists(st.none() | kind)) for kind in (_numbers, _texts))))
def test_a_sorted_lookup_finds_what_a_hash_table_finds(case: tuple[set, list]) -> None:
    known, asked = case
    kind = pa.string() if any(isinstance(x, str) for x in [*known, *asked]) else pa.int64()
    raw, ids = pa.array(sorted(known, key=str), kind), pa.array([*asked, *known], kind)
    np.testing.assert_array_equal(SortedIds(raw).indices(ids), RawIds(raw).indices(ids))


def test_texts_with_equal_hashes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_lookup, "words", lambda ids: np.zeros(len(ids), np.uint64))
    raw = pa.array(["a", "b", "c"])
    assert SortedIds(raw).indices(pa.array(["c", "d", "a", "b"])).tolist() == [2, -1, 0, 1]


def test_a_word_is_that_of_the_id_wherever_it_is_in_an_array() -> None:
    ids = pa.array(["ab", "", "ba", "abc", "b"])
    assert len(set(words(ids).tolist())) == 5
    assert words(ids.slice(2, 2)).tolist() == words(ids).tolist()[2:4]
    assert words(ids.slice(1, 1)).tolist() == words(pa.array([""])).tolist()
