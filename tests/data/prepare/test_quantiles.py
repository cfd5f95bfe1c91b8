"""Order statistics by counting, against sorting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invdist.data.prepare.quantiles import order_statistics


@settings(max_examples=40)
@given(
    st.lists(st.floats(allow_nan=False), min_size=1, max_size=40).map(np.array)
    | st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40).map(lambda x: np.array(x, np.int64)),
    st.data(),
)
def test_equals_sorting(values: np.ndarray, data: st.DataObject):
    rank = data.draw(st.integers(0, len(values) - 1))
    pieces = np.array_split(values, 3)
    found = order_statistics(lambda: pieces, [0, rank, len(values) - 1])
    assert found == np.sort(values)[[0, rank, -1]].tolist()


def test_a_rank_beyond_the_column():
    with pytest.raises(IndexError, match="rank 3 of 3"):
        order_statistics(lambda: [np.arange(3.0)], [3])
