"""Which checkpoint is to be served: each new one once, and that of another run when a link is pointed at it."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from invdist.bench.serve import newest_checkpoint
from invdist.runtime.errors import UserError
from invdist.serving.run import TrainedRun, open_run
from invdist.serving.service import watch
from invdist.serving.service.watch import CheckpointWatcher


def test_a_new_checkpoint_is_opened_once(trained_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    newest = newest_checkpoint(run)
    newest.rename(tmp_path / "hidden")
    watcher = CheckpointWatcher(run, which="last")
    before = watcher.changed()
    assert before is not None
    assert watcher.changed() is None
    (tmp_path / "hidden").rename(newest)
    after = watcher.changed()
    assert after is not None
    assert after.checkpoint.step > before.checkpoint.step
    assert watcher.changed() is None


def test_a_link_that_is_pointed_at_another_run_is_followed(trained_run: Path, tmp_path: Path) -> None:
    for name in ("monday", "tuesday"):
        shutil.copytree(trained_run, tmp_path / name)
    today = tmp_path / "today"
    today.symlink_to("monday")
    watcher = CheckpointWatcher(today)
    opened = watcher.changed()
    assert opened is not None
    assert opened.folder.name == "monday"
    today.unlink()
    with pytest.raises(UserError):
        watcher.changed()
    today.symlink_to("tuesday")
    opened = watcher.changed()
    assert opened is not None
    assert opened.folder.name == "tuesday"
    assert watcher.changed() is None


class _Clock:
    """`time` in the module of the watcher: nobody sleeps, and the test sets the hour."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(watch, "time", clock)
    return clock


def test_a_damaged_checkpoint_is_read_once_a_minute(
    trained_run: Path, tmp_path: Path, clock: _Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    newest = newest_checkpoint(run)
    shutil.copytree(newest, tmp_path / "intact")
    for file in newest.glob("*.safetensors"):
        file.write_bytes(bytes(file.stat().st_size))
    reads = []
    monkeypatch.setattr(watch, "open_run", lambda *asked: reads.append(asked) or open_run(*asked))
    watcher = CheckpointWatcher(run, which="last")
    with pytest.raises(UserError):
        watcher.changed()
    for _ in range(50):
        clock.now += 1
        assert watcher.changed() is None
    assert len(reads) == 1
    newest.rename(tmp_path / "damaged")
    assert watcher.changed() is not None, "the one before it, at once"
    (tmp_path / "intact").rename(newest)
    assert watcher.changed() is not None


def test_a_checkpoint_that_was_not_taken_is_tried_again(
    trained_run: Path, clock: _Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_log", logging.getLogger("watch"))  # Ray's own logger may not reach caplog
    tried: list[float] = []

    def take(run: TrainedRun) -> None:
        tried.append(clock.now)
        if len(tried) < 4:
            raise RuntimeError("no memory")
        raise KeyboardInterrupt  # ends the loop of the test

    with pytest.raises(KeyboardInterrupt):
        CheckpointWatcher(trained_run).follow(take)
    assert tried == [1, 61, 121, 181]
    assert [record.getMessage() for record in caplog.records] == [
        "the checkpoint in use stays: RuntimeError: no memory"
    ]
