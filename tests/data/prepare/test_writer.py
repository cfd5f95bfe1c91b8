"""An interrupted prepare is never taken for whole."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from invdist.data.dataset import Dataset
from invdist.data.prepare.labeling import Labeling
from invdist.data.prepare.options import Options
from invdist.data.prepare.pipeline import no_progress, prepare
from invdist.data.prepare.synthetic import PRESETS, SyntheticLog
from invdist.data.prepare.writer import DatasetWriter
from invdist.runtime.errors import UserError

ROOT = Path(__file__).resolve().parents[3]


def make(output: Path, progress=no_progress, **options) -> None:
    log = SyntheticLog("tiny", PRESETS["tiny"], 0)
    prepare(log, Labeling(rules=("finish_rate",)), Options(**options), output, progress)


def test_disk_full_at_any_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = DatasetWriter._write
    for allowed in (0, 3, 8):
        writes = iter(range(100))

        def full(self, path, table, allowed=allowed, writes=writes):
            if next(writes) >= allowed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return whole(self, path, table)

        monkeypatch.setattr(DatasetWriter, "_write", full)
        with pytest.raises(UserError, match=r"no room to write .*No space left on device"):
            make(tmp_path / "data", shard_rows=500)
        assert not list(tmp_path.iterdir())


def test_what_killed_calls_have_left_is_named_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(self, path, table):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(DatasetWriter, "_write", full)
    for name in (".data.partial-0123abcd", ".other.partial-0123abcd"):
        (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=r"removed again.* have left [^ ]*/\.data\.partial-0123abcd, which can"):
        make(tmp_path / "data")
    assert len(list(tmp_path.iterdir())) == 2


def test_a_real_limit_on_file_size(tmp_path: Path):
    """The kernel refuses to let files grow half-way through the log."""
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "from invdist.cli.prepare import main\n"
        f"sys.exit(main(['synthetic', '--output', {str(tmp_path / 'data')!r}, 'preset=tiny']))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "error: no room to write" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_killed_prepare_is_no_data_set(tmp_path: Path):
    command = [sys.executable, "-m", "invdist", "prepare", "synthetic", "--output", str(tmp_path / "data")]
    process = subprocess.Popen([*command, "preset=small"], cwd=ROOT, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(tmp_path.glob(".data.partial-*/spill/*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".data.partial-")
    with pytest.raises(UserError, match="is not a prepared data set"):
        Dataset.open(str(left))
    with pytest.raises(UserError, match="is not a prepared data set"):
        Dataset.open(str(tmp_path / "data"))


def test_an_interrupt_cleans_up(tmp_path: Path):
    def interrupt(stage: str, rows: int) -> None:
        if stage == "writing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "data", progress=interrupt)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path):
    (tmp_path / "data").mkdir()
    with pytest.raises(UserError, match="is already there"):
        make(tmp_path / "data")

    def appear(stage: str, rows: int) -> None:
        (tmp_path / "late").mkdir(exist_ok=True)
        (tmp_path / "late" / "somebody's").touch()

    with pytest.raises(UserError, match="appeared while it was being written"):
        make(tmp_path / "late", progress=appear)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"):
        make(tmp_path / "file" / "data")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "file", "late"]


def test_shards_are_cut_at_their_size(tmp_path: Path):
    writer = DatasetWriter(tmp_path, shard_rows=100)
    for start in range(0, 1050, 70):
        rows = np.arange(start, start + 70, dtype=np.int32)
        writer.add("train", {"user": rows, "item": rows, "label": np.zeros(70, np.int8)})
    writer.finish({"users": 1, "items": 1})
    assert [entry["rows"] for entry in writer.shards["train"]] == [100] * 10 + [50]
