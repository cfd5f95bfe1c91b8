"""How fast a run learns, by its position."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from invdist.learning.strategy import Phase
from invdist.training.checkpoint import Position
from invdist.training.pace import Pace

_PHASES = (Phase("train", ("train",), part=(0, 2)), Phase("more", ("train",), passes=2, part=(1, 2)))


def _pace(*, falling: bool) -> Pace:
    streams: Any = [SimpleNamespace(steps=7), SimpleNamespace(steps=7)]
    return Pace(_PHASES, streams, first_epoch=5, epochs=3, falling=falling)


def _positions() -> list[Position]:
    """All positions of the run in order: two phases over halves of 7 steps, the second one twice."""
    of_epoch = [(0, 0, step) for step in range(3)]
    of_epoch += [(1, number, step) for number in range(2) for step in range(3, 7)]
    return [Position(epoch=epoch, phase=p, pass_index=n, step=s) for epoch in (5, 6, 7) for p, n, s in of_epoch]


def test_rates_fall_in_a_straight_line_with_the_mean_of_constant_ones() -> None:
    pace = _pace(falling=True)
    found = [pace.at(position) for position in _positions()]
    assert found == pytest.approx([2 * (1 - n / 33) for n in range(33)])
    assert pace.steps_per_epoch == 11
    assert pace.at(Position(epoch=9)) == 0  # a run that is resumed with fewer epochs than it has done


def test_rates_that_do_not_fall_are_exactly_what_they_were() -> None:
    pace = _pace(falling=False)
    assert {pace.at(position) for position in _positions()} == {1.0}


def test_only_the_last_epoch_of_falling_rates_is_one_to_choose() -> None:
    assert [_pace(falling=True).chooses(epoch) for epoch in (5, 6, 7)] == [False, False, True]
    assert all(_pace(falling=False).chooses(epoch) for epoch in (5, 6, 7))
