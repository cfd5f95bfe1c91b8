"""Growth and memory at their smallest size."""

from __future__ import annotations

import json

import numpy as np
import pytest

from invdist.bench.growth import exponent
from invdist.cli import bench


def test_exponent_of_a_power_law() -> None:
    sizes = [10, 100, 1000]
    assert exponent(sizes, [3 * size**0.7 for size in sizes]) == pytest.approx(0.7)


def test_growth_with_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--users", "300", "--items", "500", "--dim", "8", "--repeats", "2", "--json"]
    assert bench.main(["growth", "--sweep", "batch", "--sizes", "64", "32768", *small]) == 0
    batch = json.loads(capsys.readouterr().out)["batch"]
    assert batch["sizes"] == [64, 32768]
    for kind in ("plain", "ig"):
        slope = np.log(batch[f"{kind}_ms"][1] / batch[f"{kind}_ms"][0]) / np.log(512)
        assert batch[f"{kind}_exponent"] == pytest.approx(slope)
        assert 0 < batch[f"{kind}_exponent"] < 1.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sweep", "sizes"),
    [("dim", [8, 16]), ("rows", [400, 4000]), ("ranks", [1, 2]), ("candidates", [3, 7]), ("rate", [1, 4])],
)
def test_growth_with_everything_else(sweep: str, sizes: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--users", "300", "--items", "500", "--dim", "8", "--batch", "64", "--repeats", "1", "--json"]
    assert bench.main(["growth", "--sweep", sweep, "--sizes", *map(str, sizes), *small]) == 0
    found = json.loads(capsys.readouterr().out)[sweep]
    assert found["sizes"] == sizes
    assert min(found["ig_ms"]) > 0


def test_sizes_of_several_sweeps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["growth", "--sizes", "1", "2"]) == 2
    assert "--sweep" in capsys.readouterr().err


def test_memory_is_at_least_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--rows", "1000000", "--dim", "8", "--batch", "64", "--world-size", "1", "--optimizer", "adam", "--json"]
    assert bench.main(["memory", *small]) == 0
    figures = json.loads(capsys.readouterr().out)
    (row,) = figures["ranks"]
    assert row["least_mb"] == pytest.approx(3 * 1_000_000 * 8 * 4 / 2**20)
    assert 0.95 * row["least_mb"] < row["built_mb"] <= row["none_mb"] <= row["ig_mb"] < 3 * row["least_mb"]
    assert figures["ratio"] == pytest.approx(row["ig_mb"] / row["least_mb"])
