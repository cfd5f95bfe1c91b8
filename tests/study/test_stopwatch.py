"""The wall time of a study: over its sessions, also one that was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from invdist.study import stopwatch
from invdist.study.stopwatch import Stopwatch


def test_sessions_add_up_to_the_last_trial_of_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 100.0
    monkeypatch.setattr(stopwatch.time, "monotonic", lambda: clock)
    first = Stopwatch(tmp_path)
    with first.running():
        (tmp_path / "trials").mkdir()
        assert Stopwatch(tmp_path).seconds == 0
        clock += 10
        first.note()
        clock += 5
    clock += 1000  # between two runs of trials no time counts
    with first.running():
        clock += 2
    assert Stopwatch(tmp_path).seconds == 17
    killed = Stopwatch(tmp_path).running()
    killed.__enter__()
    clock += 7
    assert Stopwatch(tmp_path).seconds == 17
    last = Stopwatch(tmp_path)
    with last.running():
        clock += 3
    assert Stopwatch(tmp_path).seconds == last.seconds == 20


def test_a_study_whose_first_trials_were_not_timed_has_no_wall_time(tmp_path: Path) -> None:
    (tmp_path / "trials").mkdir()
    with Stopwatch(tmp_path).running():
        pass
    assert Stopwatch(tmp_path).seconds is None
