"""Never an observed pair, the right chances, and an answer for everybody."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invdist.data.stream.observed import ObservedPairs
from invdist.data.stream.sampler import Sampler
from invdist.runtime.errors import UserError

USERS, ITEMS = 12, 15
PAIRS = st.sets(st.tuples(st.integers(0, USERS - 1), st.integers(0, ITEMS - 1)))


def observed(pairs: set[tuple[int, int]], users: int = USERS, items: int = ITEMS) -> ObservedPairs:
    user, item = (np.array(column, np.int32) for column in zip(*pairs)) if pairs else (np.empty(0, np.int32),) * 2
    return ObservedPairs(user, item, users, items)


def positions(rows: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + rows, dtype=np.uint64)


@given(PAIRS)
def test_the_set_is_exact(pairs: set[tuple[int, int]]):
    user, item = (grid.ravel() for grid in np.meshgrid(np.arange(USERS), np.arange(ITEMS), indexing="ij"))
    found = observed(pairs).contains(user, item)
    assert {(u, i) for u, i, hit in zip(user.tolist(), item.tolist(), found) if hit} == pairs


def test_the_set_is_exact_at_size():
    rng = np.random.default_rng(0)
    user, item = rng.integers(0, 500, 200_000), rng.integers(0, 5000, 200_000)
    known = ObservedPairs(user, item, 500, 5000)
    assert known.contains(user, item).all()
    asked, other = rng.integers(0, 500, 50_000), rng.integers(0, 5000, 50_000)
    members = set(zip(user.tolist(), item.tolist()))
    expected = [pair in members for pair in zip(asked.tolist(), other.tolist())]
    assert known.contains(asked, other).tolist() == expected


@settings(max_examples=60)
@given(PAIRS, st.sampled_from([0.0, 0.75]), st.integers(0, 2**40))
def test_sampled_pairs_are_never_observed(pairs: set[tuple[int, int]], popularity: float, start: int):
    if len(pairs) == USERS * ITEMS:
        return
    asked = np.arange(200) % USERS
    user, item = Sampler(observed(pairs), 1, popularity).sample(asked, positions(200, start))
    assert not set(zip(user.tolist(), item.tolist())) & pairs
    assert np.all((item >= 0) & (item < ITEMS))
    full = {u for u in range(USERS) if sum(pair[0] == u for pair in pairs) == ITEMS}
    assert np.all((user == asked) | np.isin(asked, list(full)))


def test_unseen_items_are_equally_likely():
    # Items 0 to 11 of 15 are seen: rejection rarely ends, so both ways of drawing take part.
    known = observed({(0, item) for item in range(12)})
    rows = 30_000
    _, item = Sampler(known, 3).sample(np.zeros(rows, int), positions(rows))
    counts = np.bincount(item, minlength=ITEMS)
    assert counts[:12].sum() == 0
    assert np.all(np.abs(counts[12:] - rows / 3) < 5 * np.sqrt(rows / 3))


def test_popularity_tilts_the_chances():
    known = observed({(user, 0) for user in range(1, 9)} | {(user, 1) for user in range(1, 3)})
    rows = 40_000
    _, item = Sampler(known, 3, popularity=0.75).sample(np.zeros(rows, int), positions(rows))
    counts = np.bincount(item, minlength=ITEMS)
    weight = (np.array([8, 2] + [0] * 13) + 1.0) ** 0.75
    expected = rows * weight / weight.sum()
    assert np.all(np.abs(counts - expected) < 5 * np.sqrt(expected))


def test_a_user_who_has_seen_everything_hands_the_row_on():
    everything = {(user, item) for user in (3, 4, USERS - 1) for item in range(ITEMS)}
    sampler = Sampler(observed(everything | {(5, 1), (0, 1)}), 0)
    assert sampler.saturated_users == 3
    user, item = sampler.sample(np.array([3, 4, USERS - 1, 2]), positions(4))
    assert user.tolist() == [5, 5, 0, 2]
    assert not np.any(item[:3] == 1)


def test_the_last_unseen_item_is_found():
    known = observed({(user, item) for user in range(USERS) for item in range(ITEMS) if item != user})
    user, item = Sampler(known, 0).sample(np.arange(USERS), positions(USERS))
    assert user.tolist() == item.tolist() == list(range(USERS))


def test_nothing_to_sample_is_said():
    with pytest.raises(UserError, match="all 12 x 15 pairs were observed"):
        Sampler(observed({(user, item) for user in range(USERS) for item in range(ITEMS)}), 0)


def test_a_draw_depends_on_its_position_alone():
    known = observed({(user, item) for user in range(USERS) for item in range(user)})
    asked = np.arange(600) % USERS
    whole = Sampler(known, 5, 0.75).sample(asked, positions(600))
    again = Sampler(known, 5, 0.75)
    for low in range(0, 600, 37):
        part = again.sample(asked[low : low + 37], positions(600)[low : low + 37])
        assert np.array_equal(part[1], whole[1][low : low + 37])
    assert not np.array_equal(Sampler(known, 6, 0.75).sample(asked, positions(600))[1], whole[1])
