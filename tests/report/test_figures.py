from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from invdist.report import figures
from invdist.training.history import History
from tests.report.generated import ig_events, write_run


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History.read(write_run(tmp_path / "run", ig_events(epochs=3, train_steps=6, test_steps=40)))


def traces(figure: Any) -> dict[str, Any]:
    return {trace.name: trace for trace in figure.data}


def test_the_timeline_has_every_step_once_under_its_direction(history: History) -> None:
    shown = traces(figures.direction_timeline(history))
    assert set(shown) == {"direct", "pass", "inverse"}
    for name, multiplier in (("direct", -1), ("pass", 0), ("inverse", 1)):
        steps = [event for event in history.events if event.get("direction") == multiplier]
        assert list(shown[name].x) == [step["global_step"] for step in steps]
        # The three-candidate choice takes the smallest loss, so what is drawn must be that minimum.
        assert list(shown[name].y) == [min(step["candidate_losses"]) for step in steps]


def test_counts_add_up_to_the_steps(history: History) -> None:
    shown = traces(figures.direction_counts(history))
    assert [sum(counts) for counts in zip(*(trace.y for trace in shown.values()), strict=True)] == [
        40,
        40,
        40,
    ]


def test_histograms_show_the_first_and_the_last_epoch_as_shares(history: History) -> None:
    for weight in ("w1", "w0"):
        shown = traces(figures.annotation_histograms(history, weight))
        assert list(shown) == ["epoch 0", "epoch 2"]
        assert sum(shown["epoch 2"].y) == pytest.approx(1)
        counts = history.epochs[-1]["annotations"][weight]
        assert shown["epoch 2"].y[3] == pytest.approx(counts[3] / sum(counts))
        assert shown["epoch 2"].x[0] == pytest.approx(0.025)


def test_one_epoch_is_not_compared_with_itself(tmp_path: Path) -> None:
    short = History.read(write_run(tmp_path / "one", ig_events(epochs=1)))
    assert list(traces(figures.annotation_histograms(short))) == ["epoch 0"]


def test_what_a_run_does_not_have_is_not_drawn(tmp_path: Path) -> None:
    bare = History.read(write_run(tmp_path / "bare", [{"event": "start"}]))
    alone = (
        figures.direction_timeline,
        figures.direction_counts,
        figures.annotation_histograms,
        figures.annotation_auc,
        figures.reliability,
        figures.time_split,
    )
    together = (figures.loss_curve, figures.metric_curves, figures.throughput)
    assert [draw(bare) for draw in alone] == [None] * len(alone)
    assert [draw([bare]) for draw in together] == [None] * len(together)


def test_empty_reliability_bins_are_left_out(tmp_path: Path) -> None:
    events = ig_events(epochs=1)
    next(event for event in events if event["event"] == "epoch")["annotations"]["reliability"] = [
        [0.1, 0.2, 5],
        [0.5, None, 0],
        [0.9, 0.7, 8],
    ]
    shown = traces(figures.reliability(History.read(write_run(tmp_path / "run", events))))
    assert (list(shown["annotations"].x), list(shown["annotations"].y)) == ([0.1, 0.9], [0.2, 0.7])


def test_long_series_are_thinned_evenly() -> None:
    kept, stride = figures.thin(range(18_480), limit=3000)
    assert stride == 7
    assert len(kept) <= 3000
    assert kept[:3] == [0, 7, 14]
    assert figures.thin(range(3000), limit=3000) == (list(range(3000)), 1)


def test_runs_side_by_side_are_told_apart_and_names_escaped(tmp_path: Path) -> None:
    one = History.read(write_run(tmp_path / "one", ig_events()))
    two = History.read(write_run(tmp_path / "<b>two", ig_events(seed=1)))
    figure: Any = figures.metric_curves([one, two])
    names = [trace.name for trace in figure.data]
    assert names[0] == "one: AUC"
    assert "&lt;b&gt;two: AUC" in names
    assert len(set(names)) == len(names) == 8
