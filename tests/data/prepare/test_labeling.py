"""Labels against hand-made cases and against the documented rules."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from invdist.data.prepare.labeling import Labeling, by_feedback, by_finish_rate, by_play_time, by_rating, first_clear

NAN = float("nan")
NUMBERS = st.one_of(st.floats(-10, 100), st.just(NAN))


def test_finish_rate_is_clear_only_outside_its_bounds():
    play = np.array([8.1, 8.0, 5.0, 2.0, 1.9, 0.0, 30.0])
    assert by_finish_rate(play, np.full(7, 10.0)).tolist() == [1, -1, -1, -1, 0, 0, 1]


@pytest.mark.parametrize(
    ("play", "duration"), [(NAN, 10.0), (5.0, NAN), (5.0, 0.0), (5.0, -3.0), (-1.0, 10.0), (-5.0, -5.0)]
)
def test_what_cannot_be_judged_is_unclear(play: float, duration: float):
    assert by_finish_rate(np.array([play]), np.array([duration])).tolist() == [-1]


def test_quartiles_of_play_time():
    play = np.arange(1.0, 9.0)
    lower, upper = np.quantile(play, [0.25, 0.75], method="lower")
    labels = by_play_time(np.append(play, [NAN, -1.0]), lower, upper)
    assert labels.tolist() == [0, 0, -1, -1, -1, 1, 1, 1, -1, -1]


def test_equal_quartiles_say_nothing():
    assert by_play_time(np.full(4, 7.0), 7.0, 7.0).tolist() == [-1] * 4


def test_feedback_must_not_contradict_itself():
    like, hate = np.array([1.0, 0, 1, 0, NAN]), np.array([0.0, 1, 1, 0, NAN])
    assert by_feedback(like, hate).tolist() == [1, 0, -1, -1, -1]


def test_rating_thresholds_may_leave_a_gap():
    rating = np.array([1.0, 2.0, 2.5, 3.0, 5.0, NAN])
    assert by_rating(rating, 3, 2).tolist() == [0, 0, -1, 1, 1, -1]
    assert by_rating(rating, 4, 1).tolist() == [0, -1, -1, -1, 1, -1]


def test_the_first_clear_rule_decides():
    chain = Labeling(rules=("feedback", "finish_rate"))
    columns = {
        "like": np.array([1.0, 0, 0]),
        "hate": np.array([0.0, 0, 1]),
        "play_time": np.array([0.0, 9.0, 9.0]),
        "duration": np.full(3, 10.0),
    }
    assert chain.label(columns).tolist() == [1, 1, 0]
    assert chain.columns == ("like", "hate", "play_time", "duration")
    assert first_clear([np.array([-1, 0], np.int8), np.array([1, 1], np.int8)]).tolist() == [1, 0]


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=30))
def test_finish_rate_as_read_aloud(rows: list[tuple[float, float]]):
    def expected(play: float, duration: float) -> int:
        if not (play >= 0 and duration > 0):
            return -1
        return 1 if play / duration > 0.8 else 0 if play / duration < 0.2 else -1

    play, duration = (np.array(column) for column in zip(*rows))
    assert by_finish_rate(play, duration).tolist() == [expected(*row) for row in rows]
