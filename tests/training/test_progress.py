"""What a person sees of a run: one line a table and an epoch, no planner statistics, warnings in full."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from invdist.training import progress
from invdist.training.events import EventLog
from invdist.training.progress import ProgressView, describe
from tests.report.generated import ig_events


def _shown(run: Path, events: list[dict]) -> list[str]:
    out = io.StringIO()
    with ProgressView(run, out):
        log = EventLog(run, writes=True)
        for event in events:
            log.write(event["event"], **{name: value for name, value in event.items() if name not in ("event", "time")})
        log.close()
    return out.getvalue().splitlines()


def test_a_log_has_a_line_for_each_table_epoch_and_warning(tmp_path: Path) -> None:
    start = {
        "event": "start",
        "method": "ig",
        "model": "gmf",
        "world_size": 2,
        "device": "cpu",
        "backend": "gloo",
        "plan": [{"table": name, "rows": 6040, "dim": 32, "sharding": "row_wise"} for name in ("user", "item")],
        "plan_stats": "--- Planner Statistics ---\n" * 25,
    }
    epochs = [event for event in ig_events(epochs=3) if event["event"] in ("step", "epoch")]
    warning = {"event": "warning", "message": "the model is [bold]below[/bold] the means"}
    lines = _shown(tmp_path, [start, *epochs, warning])
    assert lines[:3] == [
        "ig on gmf: 2 rank(s), cpu, gloo",
        "  user: 6,040 x 32, row_wise",
        "  item: 6,040 x 32, row_wise",
    ]
    assert [line.split(":")[0] for line in lines[3:6]] == ["epoch 0", "epoch 1", "epoch 2"], "counted as in the events"
    assert lines[6:] == ["warning: the model is [bold]below[/bold] the means"]


def test_a_run_that_goes_on_from_another_says_what_became_of_the_ids() -> None:
    users = {"known_users": 1200, "new_users": 30, "dropped_users": 0}
    items = {"known_items": 90, "new_items": 0, "dropped_items": 7}
    assert describe({"event": "grown", "checkpoint": "runs/monday/step-9", "epoch": 3, **users, **items}) == (
        "going on from runs/monday/step-9: 1,200 users known, 30 new, 0 dropped; 90 items known, 0 new, 7 dropped"
    )


def test_a_loss_that_is_not_finite_is_a_dash() -> None:
    epoch = next(event for event in ig_events() if event["event"] == "epoch")
    assert "loss -  valid" in (describe(epoch | {"loss": None}) or "")


def test_the_stage_of_exposure_vectors_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LOG_SECONDS", 0.0)
    product = {"event": "vectors", "products": 14, "exposures": 60_000, "seconds": 0.84}
    lines = _shown(tmp_path, [product | {"product": number} for number in range(1, 15)])
    assert lines[-1] == "exposure vectors: product 14 of 14, 0.8 s; learned from 60,000 exposures"
    unfinished = _shown(tmp_path / "killed", [product | {"product": 3}])
    assert any("exposure vectors: product 3 of 14, 0.8 s" in line for line in unfinished)
