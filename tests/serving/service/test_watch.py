"""Which checkpoint is to be served: each new one once, and that of another run when a link is pointed at it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from invdist.bench.serve import newest_checkpoint
from invdist.runtime.errors import UserError
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
