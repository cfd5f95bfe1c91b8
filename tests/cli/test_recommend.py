"""`invdist recommend`: raw ids in every format, against scoring every pair with the strategy."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from invdist.bench import recommend as bench
from invdist.cli import recommend
from invdist.data.dataset import Dataset


def _rows(folder: Path) -> list[dict[str, Any]]:
    manifest = json.loads((folder / "manifest.json").read_text())
    file = folder / manifest["file"]
    if file.suffix == ".parquet":
        rows = pq.read_table(file).to_pylist()
    elif file.suffix == ".jsonl":
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    else:
        rows = list(csv.DictReader(file.read_text().splitlines()))
    assert len(rows) == manifest["rows"]
    return [{name: float(value) if name == "score" else int(value) for name, value in row.items()} for row in rows]


def _recommend(*arguments: str | int | Path) -> int:
    return recommend.main(list(map(str, arguments)))


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_the_best_unseen_items_of_every_user(
    trained_run: Path, tiny_data: Path, every_score: np.ndarray, tmp_path: Path, kind: str
) -> None:
    assert _recommend("--run", trained_run, "--k", 5, "--format", kind, "--output", tmp_path / "out") == 0
    rows = _rows(tmp_path / "out")
    seen = every_score.copy()
    for split in ("train", "training_test"):
        table = Dataset.open(str(tiny_data)).read(split)
        seen[table["user"].to_numpy(), table["item"].to_numpy()] = -np.inf
    expected = -np.sort(-seen, axis=1)[:, :5]
    assert [row["user"] for row in rows] == np.repeat(np.arange(len(seen)), 5).tolist()
    assert [row["rank"] for row in rows] == [1, 2, 3, 4, 5] * len(seen)
    np.testing.assert_allclose([row["score"] for row in rows], expected.ravel(), atol=1e-5)
    np.testing.assert_allclose([seen[row["user"], row["item"]] for row in rows], expected.ravel(), atol=1e-5)


def test_given_users_and_what_counts_as_seen(
    trained_run: Path, tiny_data: Path, every_score: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "users.csv").write_text("id\n7\n3\n9999\n")
    given = ("--run", trained_run, "--k", 1, "--users", tmp_path / "users.csv", "--user-column", "id")
    assert _recommend(*given, "--seen", "nothing", "--unknown", "drop", "--output", tmp_path / "all") == 0
    assert "1 users are not in the run's data set, such as '9999' (left out)" in capsys.readouterr().err
    rows = _rows(tmp_path / "all")
    assert [row["user"] for row in rows] == [7, 3]
    assert [row["item"] for row in rows] == every_score[[7, 3]].argmax(1).tolist()
    splits = ["train", "training_test", "valid", "test", "unclear"]
    assert _recommend(*given[:2], "--k", 300, "--output", tmp_path / "rest", "--seen", *splits) == 0
    dataset = Dataset.open(str(tiny_data))
    seen = {
        pair
        for split in splits
        for pair in zip(*dataset.read(split, ["user", "item"]).to_pydict().values(), strict=True)
    }
    found = {(row["user"], row["item"]) for row in _rows(tmp_path / "rest")}
    assert not found & seen
    assert len(found) + len(seen) == every_score.size


def test_what_cannot_be_recommended(trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*arguments: str | int | Path) -> str:
        assert _recommend("--run", trained_run, *arguments) == 2
        return capsys.readouterr().err

    assert "k=301 is more than the 300 items" in error("--k", 301, "--output", tmp_path / "out")
    assert "is already there" in error("--output", tmp_path)
    (tmp_path / "users.csv").write_text("user\nnobody\n")
    given = ("--users", tmp_path / "users.csv", "--output", tmp_path / "out", "--unknown", "drop")
    assert "such as 'nobody'; none is left to recommend to" in error(*given)
    assert "column user is missing" not in error(*given)
    assert not (tmp_path / "out").exists()


def test_an_unknown_user_has_one_row_in_its_place(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "users.csv").write_text("user\n9999\n7\n8888\n3\nnobody\n7\n8888\n7777\n")
    given = ("--run", trained_run, "--k", 2, "--users", tmp_path / "users.csv", "--output", tmp_path / "out")
    assert _recommend(*given) == 0
    table = pq.read_table(tmp_path / "out" / "recommendations.parquet")
    assert table["user"].to_pylist() == [9999, 7, 7, 8888, 3, 3, None, 7777]  # "nobody" is no number
    unknown = [True, False, False, True, False, False, True, True]
    for name in ("rank", "item", "score"):
        assert table[name].is_null().to_pylist() == unknown
    told = "4 users are not in the run's data set, such as '9999' (without an item)"
    assert told in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["unknown_users"] == 4


def test_the_benchmark_ranks_what_it_says() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    options = ["--users", "50", "--items", "3000", "--seen", "5000", "--k", "3", "--dim", "4", "--sample", "20"]
    figures = bench.run(parser.parse_args(options))
    assert (figures["users"], figures["items"], figures["k"], figures["rows"]) == (20, 3000, 3, 60)
