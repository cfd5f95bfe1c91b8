from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from invdist.training.tensorboard import Writer
from tests.report.generated import ig_events


def test_tensorboard_reads_back_what_the_run_said(tmp_path: Path) -> None:
    events = [*ig_events(epochs=2, train_steps=3, test_steps=5), {"event": "warning", "message": "careful"}]
    # A loss that was not finite is null in the events; the others of its step still count.
    directed = [event for event in events if event.get("candidate_losses")]
    directed[0]["candidate_losses"][0] = None
    with Writer(tmp_path) as writer:
        for event in events:
            writer.write(event)
    assert len(list(tmp_path.glob("events.out.tfevents*"))) == 1
    board = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0, "histograms": 0, "scalars": 0})
    board.Reload()

    losses = [(point.step, point.value) for point in board.Scalars("step/loss")]
    steps = [event for event in events if event["event"] == "step"]
    assert [step for step, _ in losses] == [event["global_step"] for event in steps]
    assert all(abs(value - event["loss"]) < 1e-6 for (_, value), event in zip(losses, steps, strict=True))
    assert [point.value for point in board.Scalars("step/direction")] == [e["direction"] for e in directed]
    assert len(board.Scalars("candidates/-1")) == 9
    assert len(board.Scalars("candidates/+0")) == 10
    assert [point.step for point in board.Scalars("valid/auc")] == [8, 16]
    assert board.Scalars("final_test/auc")[0].value > 0.79

    first = board.Histograms("annotations/w1")[0].histogram_value
    counts = next(event for event in events if event["event"] == "epoch")["annotations"]["w1"]
    assert first.num == sum(counts)
    assert [round(count) for count in first.bucket] == counts
