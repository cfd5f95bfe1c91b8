from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invdist.serving.raw_ids import RawIds
from invdist.serving.service import lookup
from invdist.serving.service.lookup import SortedIds

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
    monkeypatch.setattr(lookup, "_keys", lambda ids: np.zeros(len(ids), np.int64))
    raw = pa.array(["a", "b", "c"])
    assert SortedIds(raw).indices(pa.array(["c", "a", "d"])).tolist() == [2, 0, -1]
