"""Shares come out exactly however the rows arrive."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from invdist.data.prepare.splitting import Shares, by_given, by_time


@given(st.lists(st.integers(0, 50), max_size=30), st.floats(0.05, 0.45), st.floats(0.05, 0.45))
def test_every_row_has_one_part_and_parts_have_their_share(pieces: list[int], valid: float, test: float):
    fractions = (1 - valid - test, valid, test)
    shares = Shares(fractions)
    parts = [shares.cut(rows) for rows in pieces]
    assert [len(part) for part in parts] == pieces
    counts = np.bincount(np.concatenate([*parts, []]).astype(int), minlength=3)
    assert np.all(np.abs(counts - sum(pieces) * np.array(fractions)) <= 1.5)


def test_the_paper_s_cut_of_ml_1m():
    shares = Shares((0.6, 0.2, 0.2))
    counts = np.bincount(np.concatenate([shares.cut(rows) for rows in (400_000, 600_000, 209)]))
    assert counts.tolist() == [600_125, 200_042, 200_042]


def test_by_time_and_given():
    assert by_time(np.array([1, 5, 6, 8, 9]), 5, 8).tolist() == [0, 0, 1, 1, 2]
    valid, test = np.array([3, 7], np.uint64), np.array([4], np.uint64)
    assert by_given(np.array([4, 3, 1, 7, 9], np.uint64), valid, test).tolist() == [2, 1, 0, 1, 0]
