"""From a log to recommendations on three Ray nodes, one of them lost, with workers that cannot hold the tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from invdist.cli import annotate, evaluate, recommend
from invdist.serving.run import find_run
from invdist.training.history import History


@pytest.mark.slow
def test_three_nodes_hold_what_no_process_holds(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = repository / "tests" / "serving" / "several_nodes.py"
    ended = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    run = tmp_path / "run"
    assert (run / "node removed").exists()
    starts = History.read(run).of("start")
    assert [event["world_size"] for event in starts] == [4, 4]
    assert find_run(run).tables.bytes > 1.4 * (190 << 20)

    whole = ["--run", str(run), "--workers", "0"]
    assert annotate.main([*whole, "--output", str(tmp_path / "labels-whole"), "--part-rows", "10000"]) == 0
    users = ["--users", str(tmp_path / "users.csv")]
    assert recommend.main([*whole, "--output", str(tmp_path / "best-whole"), *users]) == 0
    for name in ("labels", "best"):
        for file in (tmp_path / name).glob("*.parquet"):
            assert file.read_bytes() == (tmp_path / f"{name}-whole" / file.name).read_bytes()
    capsys.readouterr()
    assert evaluate.main([*whole, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(ended.stdout.splitlines()[-1])
