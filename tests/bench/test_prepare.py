"""The benchmark of `prepare` at a small size."""

from __future__ import annotations

import json

import pytest

from invdist.cli import bench


def test_prepare(capsys: pytest.CaptureFixture[str], ray_cluster: object) -> None:
    given = ["--log-rows", "3000", "--users", "500", "--items", "40", "--workers", "2", "--json"]
    assert bench.main(["prepare", *given]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["log_rows"] == 3000
    assert 400 < figures["users"] <= 500
    assert figures["ratio"] == pytest.approx(figures["one_process_seconds"] / figures["seconds"])
    assert 30 < figures["worker_memory_mb"] < 2000
