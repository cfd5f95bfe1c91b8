"""The page of benchmarks: written from figures, with every goal called met or missed by its own number."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from invdist.bench._bars import BARS
from invdist.cli import bench
from tests.conftest import REPOSITORY

_SPEEDS = {"invdist": 600_000.0, "invdist_ig": 500_000.0, "torch_loop": 300_000.0, "recbole": None}
_FIGURES = {
    "peers": {
        "data": "MovieLens-1M",
        "interactions": 600_125,
        "gmf": _SPEEDS,
        "times_peers": {"gmf": {"invdist_ig": 1.2, "torch_loop": 2.0}},
        "ig_epoch_vs_none": {"gmf": 1.4},
        "absent": {"recbole": "not asked for"},
    },
    "growth": {"batch": {"sizes": [1, 10], "ig_ms": [1.0, 30.0], "ig_exponent": 1.477, "ig_last": 1.477}},
}


def _write(folder: Path) -> None:
    kept = {
        "command": "invdist bench peers",
        "date": "2026-01-01",
        "seconds": 3,
        "load_before": 0.5,
        "used_by_others": 0.02,
        "machine": "2 cores",
    }
    results = {name: {**kept, "figures": figures} for name, figures in _FIGURES.items()}
    (folder / "benchmarks.json").write_text(json.dumps(results))


def test_the_page_says_what_was_met_and_what_was_missed(tmp_path: Path) -> None:
    _write(tmp_path)
    assert bench.main(["--report", str(tmp_path)]) == 0
    page = (tmp_path / "benchmarks.md").read_text()
    assert "| rows/s over those of the PyTorch loop (GMF, 1,024) | >= 1.5 | 2 | met |" in page
    assert "| epoch of `ig` over one of `none` (GMF, 1,024) | <= 1.35 | 1.4 | **missed** |" in page
    assert "Goals: 1 of 2 met" in page
    assert "load before it 0.50, others used 2% of the CPUs" in page
    assert "**1.48**" in page  # grows faster than in proportion
    for name in ("peers", "growth"):
        assert f"(figures/{name}.svg)" in page
        assert ElementTree.parse(tmp_path / "figures" / f"{name}.svg").getroot().tag.endswith("svg")


def test_without_figures_there_is_nothing_to_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--report", str(tmp_path)]) == 2
    assert "measure first" in capsys.readouterr().err
    assert bench.main(["--all", "--only", "spead", "--report", str(tmp_path)]) == 2
    assert "spead" in capsys.readouterr().err


def test_every_goal_has_a_source_that_is_measured() -> None:
    from invdist.bench._all import PLAN

    assert {bar.source for bar in BARS} <= PLAN.keys()
    assert len({bar.what for bar in BARS}) == len(BARS)


def test_the_page_of_this_repository_is_what_its_figures_give(tmp_path: Path) -> None:
    kept = REPOSITORY / "docs" / "benchmarks.json"
    if not kept.exists():
        pytest.skip("nothing was measured yet")
    (tmp_path / "benchmarks.json").write_text(kept.read_text())
    assert bench.main(["--report", str(tmp_path)]) == 0
    assert (tmp_path / "benchmarks.md").read_text() == (REPOSITORY / "docs" / "benchmarks.md").read_text()
