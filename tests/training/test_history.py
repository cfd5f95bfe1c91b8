from __future__ import annotations

import json
from pathlib import Path

import pytest

from invdist.runtime.errors import UserError
from invdist.training.events import EventLog
from invdist.training.history import METRICS_FILE, History, Tail, direction_name, read_events, table
from tests.report.generated import ig_events, write_run


def test_a_run_is_read_back_in_order(tmp_path: Path) -> None:
    history = History.read(write_run(tmp_path / "run", ig_events(epochs=3, train_steps=6, test_steps=4)))
    assert len(history.steps) == 30
    assert [step["global_step"] for step in history.steps] == list(range(1, 31))
    assert len(history.direction_steps) == 12
    assert [epoch["epoch"] for epoch in history.epochs] == [0, 1, 2]
    assert history.final is not None
    assert (history.method, history.model, history.ndcg_k) == ("ig", "gmf", 10)
    assert history.dataset["users"] == 6040


def test_the_line_being_written_is_left_out_wherever_it_breaks(tmp_path: Path) -> None:
    whole = json.dumps({"event": "warning", "message": "ä"}, ensure_ascii=False).encode()
    first = b'{"event": "start"}\n'
    path = tmp_path / "metrics.jsonl"
    for length in range(len(whole)):
        path.write_bytes(first + whole[:length])
        assert [event["event"] for event in read_events(path)] == ["start"], length
    path.write_bytes(first + whole)
    assert [event["event"] for event in read_events(path)] == ["start", "warning"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"event": "sta', "not JSON"),
        ("[1, 2]", "must be a JSON object"),
        ('{"epoch": 1}', "must be a JSON object"),
        ('{"event": "step", "epoch": 0, "global_step": 1}', 'has no "loss"'),
        ('{"event": "step", "epoch": 0, "global_step": "1", "loss": 0.1}', '"global_step"'),
        ('{"event": "step", "epoch": true, "global_step": 1, "loss": 0.1}', '"epoch"'),
        ('{"event": "step", "epoch": 0, "global_step": 1, "loss": 0.1, "direction": "up"}', '"direction"'),
        ('{"event": "epoch", "epoch": 0, "valid": [1]}', '"valid"'),
        ('{"event": "warning"}', 'has no "message"'),
    ],
)
def test_a_broken_line_is_named_by_file_and_line(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "start"}\n\n' + line + "\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 3") as error:
        read_events(path)
    assert said in str(error.value)


def test_a_resumed_run_keeps_the_last_record_of_a_step(tmp_path: Path) -> None:
    def step(number: int, loss: float) -> dict[str, object]:
        return {"event": "step", "epoch": 0, "global_step": number, "loss": loss}

    events = [{"event": "start"}, step(1, 0.5), step(2, 0.4), step(3, 0.3)]
    events += [{"event": "start", "world_size": 4}, step(2, 0.41), step(3, 0.31), step(4, 0.21)]
    history = History.read(write_run(tmp_path / "run", events))
    assert [event["loss"] for event in history.steps] == [0.5, 0.41, 0.31, 0.21]
    assert history.start["world_size"] == 4


def test_a_run_that_went_on_after_its_end_is_not_finished(tmp_path: Path) -> None:
    events = [{"event": "start"}, {"event": "final", "method": "ig"}]
    assert History.read(write_run(tmp_path / "done", events)).final is not None
    assert History.read(write_run(tmp_path / "again", [*events, {"event": "start"}])).final is None


def test_what_is_not_a_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run folder"):
        History.read(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"has no metrics\.jsonl"):
        History.read(tmp_path)
    run = write_run(tmp_path / "run", ig_events())
    (run / "config.yaml").write_text("a: [")
    with pytest.raises(UserError, match=r"config\.yaml: line 1: not YAML"):
        History.read(run)
    (run / "config.yaml").write_text("- a\n")
    with pytest.raises(UserError, match=r"config\.yaml: expected `key: value` lines"):
        History.read(run)


def test_a_loss_that_was_not_finite_is_read_as_none(tmp_path: Path) -> None:
    events = [{"event": "start", "method": "ig"}, {"event": "step", "epoch": 0, "global_step": 1, "loss": None}]
    run = write_run(tmp_path / "run", events)
    (run / "config.yaml").unlink()
    history = History.read(run)
    assert history.steps[0]["loss"] is None
    assert (history.method, history.model) == ("ig", "unknown")


def test_events_flatten_to_columns() -> None:
    rows = table([{"event": "epoch", "epoch": 1, "valid": {"auc": 0.7, "rows": 3}, "directions": {"pass": 2}}])
    assert rows == [{"event": "epoch", "epoch": 1, "valid.auc": 0.7, "valid.rows": 3, "directions.pass": 2}]


def test_multipliers_are_named_by_sign() -> None:
    assert [direction_name(c) for c in (-3, -1, -0.3, 0, 0.0, 0.3, 1)] == [
        *["direct"] * 3,
        *["pass"] * 2,
        *["inverse"] * 2,
    ]


def test_a_log_is_followed_from_its_last_whole_line(tmp_path: Path) -> None:
    """What a killed writer left of a line is cut off by the next writer: the follower must not start behind it."""
    log = tmp_path / METRICS_FILE
    log.write_text('{"event": "epoch", "epoch": 0}\n{"event": "ep')
    tail = Tail(log)
    writer = EventLog(tmp_path, writes=True)
    writer.write("epoch", epoch=1)
    writer.close()
    assert [event["epoch"] for event in tail.new()] == [1]
    assert tail.new() == []
