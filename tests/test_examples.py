"""The example of a week, run in small on the Ray of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from invdist.runtime.private_ray import PrivateRay
from invdist.training.history import History
from tests.conftest import REPOSITORY


@pytest.mark.slow
def test_a_week_from_the_log_to_the_service(ray_cluster: PrivateRay, tmp_path: Path) -> None:
    from ray import serve

    command = [sys.executable, str(REPOSITORY / "examples" / "week.py"), "week", "--days", "3", "--rows", "12000"]
    environment = os.environ | {"RAY_ADDRESS": ray_cluster.address, "PYTHONPATH": str(REPOSITORY)}
    try:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    finally:
        serve.shutdown()
    assert done.returncode == 0, done.stdout + done.stderr
    days = ["2026-01-01", "2026-01-02", "2026-01-03"]
    runs = [History.read(tmp_path / "week" / "runs" / day) for day in days]
    assert [bool(run.of("grown")) for run in runs] == [False, True, True]
    assert "Grown against anew" in done.stdout
    assert "best of user 1" in done.stdout
    assert "exposures annotated" in done.stdout
