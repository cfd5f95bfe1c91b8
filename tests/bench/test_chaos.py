"""The soak, short: real kills, and the model of an undisturbed run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_kills_leave_no_trace(tiny_data: Path) -> None:
    # A process of its own with a Ray of its own: the benchmark kills what it started.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-m", "invdist", "bench", "chaos", "--json", f"--data={tiny_data}"]
    command += ["--minutes=1", "--kills=2", "--epochs=12"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    figures = json.loads(ended.stdout)
    assert figures["kills"] >= 1
    assert (figures["lost_rows"], figures["doubled_rows"], figures["weights_equal"]) == (0, 0, True)
    assert figures["max_recovery_s"] > 0
