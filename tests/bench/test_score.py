"""The benchmark of scoring at a small size."""

from __future__ import annotations

import json

import pytest

from invdist.cli import bench


def test_score(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["score", "--pairs", "2000", "--dim", "8", "--repeats", "400", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["ratio"] == pytest.approx(figures["kept_ms"] / figures["usual_ms"])
    assert 0 < figures["kept_ms"] < 1000
    assert 0 <= figures["kept_kernel_share"] <= 1


def test_sizes_below_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["score", "--pairs", "0"]) == 2
    assert "--pairs" in capsys.readouterr().err
