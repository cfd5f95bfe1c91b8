"""The event log: steps do not wait for the disk, nothing is lost or out of order, and a kill costs a second."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from invdist.training import events as events_module
from invdist.training.events import EventLog
from invdist.training.history import METRICS_FILE


def _written(run: Path) -> list[int]:
    return [json.loads(line)["n"] for line in (run / METRICS_FILE).read_text().splitlines()]


def _soon(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)
    return holds()


def _step(log: EventLog, n: int) -> None:
    log.write("step", n=n, global_step=n, loss=0.5)


def test_every_event_is_there_in_order_after_close(tmp_path: Path) -> None:
    log = EventLog(tmp_path, writes=True, flush_every=1000)
    for n in range(2500):
        _step(log, n)
    log.close()
    assert _written(tmp_path) == list(range(2500))
    log.write("step", n=-1, global_step=1)
    log.close()
    assert _written(tmp_path) == list(range(2500)), "a closed log takes no more"


def test_a_step_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = threading.Event()

    class Slow(events_module.Writer):
        def write(self, event: dict) -> None:
            assert disk.wait(30)
            super().write(event)

    monkeypatch.setattr(events_module, "Writer", Slow)
    log = EventLog(tmp_path, writes=True)
    for n in range(100):
        _step(log, n)  # returns although nothing can be written
    assert _written(tmp_path) == []
    disk.set()
    log.close()
    assert _written(tmp_path) == list(range(100))


def test_steps_are_flushed_by_number_and_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "_FLUSH_S", 3600.0)
    log = EventLog(tmp_path, writes=True, flush_every=3)
    _step(log, 0)
    _step(log, 1)
    time.sleep(0.2)
    assert _written(tmp_path) == [], "not one by one"
    _step(log, 2)
    assert _soon(lambda: _written(tmp_path) == [0, 1, 2])
    monkeypatch.setattr(events_module, "_FLUSH_S", 0.05)
    _step(log, 3)
    assert _soon(lambda: _written(tmp_path) == [0, 1, 2, 3]), "also without another event"
    log.close()


def test_other_events_are_flushed_at_once_and_take_the_steps_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "_FLUSH_S", 3600.0)
    log = EventLog(tmp_path, writes=True, flush_every=1000)
    _step(log, 0)
    log.write("warning", n=1, message="")
    assert _soon(lambda: _written(tmp_path) == [0, 1])
    _step(log, 2)
    log.flush()
    assert _written(tmp_path) == [0, 1, 2], "a flush returns when all is in the file"
    log.close()


def test_values_are_those_of_the_time_of_writing(tmp_path: Path) -> None:
    log, directions = EventLog(tmp_path, writes=True), {"pass": 1}
    log.write("note", n=0, directions=directions)
    directions["pass"] = 2
    log.close()
    assert json.loads((tmp_path / METRICS_FILE).read_text())["directions"] == {"pass": 1}


def test_an_error_of_the_disk_is_raised_and_never_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(events_module.Writer):
        def write(self, event: dict) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(events_module, "Writer", Full)
    log = EventLog(tmp_path, writes=True)
    _step(log, 0)
    with pytest.raises(OSError, match="No space left"):
        log.flush()
    _step(log, 1)
    with pytest.raises(OSError, match="No space left"):
        log.close()


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "run", writes=False)
    log.write("step", n=0)
    log.flush()
    log.close()
    assert not (tmp_path / "run").exists()


_PROGRAM = """
import signal, sys, time
from pathlib import Path
from invdist.runtime.errors import UserError
from invdist.training.events import EventLog

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it starts in the background
log = EventLog(Path(sys.argv[1]), writes=True, flush_every=1000)
for n in range(100):
    log.write("step", n=n, global_step=n)
if sys.argv[2] == "UserError":
    raise UserError("no")
print("written", flush=True)
if sys.argv[2] in ("SIGINT", "SIGKILL"):
    time.sleep(60)
"""


@pytest.mark.parametrize("end", ["return", "UserError", "SIGINT", "SIGKILL"])
def test_a_process_that_ends_without_closing_loses_nothing(tmp_path: Path, end: str) -> None:
    """Killed, it keeps what is older than a second."""
    program = [sys.executable, "-c", _PROGRAM, str(tmp_path), end]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ}) as process:
        assert process.stdout is not None
        process.stdout.readline()
        if end == "SIGKILL":
            time.sleep(3.0)
        if end.startswith("SIG"):
            process.send_signal(getattr(signal, end))
        process.wait(60)
    assert _written(tmp_path) == list(range(100))
