"""`invdist score`: one row for each pair, in order, against scoring with the strategy."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from invdist.cli import score

PAIRS = "item,user\n5,1\n6,77777\n6,2\n99999,2\n7,nobody\n,3\n8,3\n"
KNOWN = [True, False, True, False, False, False, True]


def _score(run: Path, *arguments: str | Path) -> int:
    return score.main(["--run", str(run), *map(str, arguments)])


def _printed(out: bytes) -> list[dict[str, Any]]:
    return list(csv.DictReader(io.StringIO(out.decode())))


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    (tmp_path / "p.csv").write_text(PAIRS)
    return tmp_path / "p.csv"


def test_every_pair_has_a_row_in_its_place(
    trained_run: Path, every_score: np.ndarray, pairs: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert _score(trained_run, "--input", pairs) == 0
    printed = capfdbinary.readouterr()
    rows = _printed(printed.out)
    assert [row["user"] for row in rows] == ["1", "77777", "2", "2", "", "3", "3"]
    assert [row["item"] for row in rows] == ["5", "6", "6", "99999", "7", "", "8"]
    assert [row["known"] == "true" for row in rows] == KNOWN
    assert [row["score"] != "" for row in rows] == [row["probability"] != "" for row in rows] == KNOWN
    expected = every_score[[1, 2, 3], [5, 6, 8]]
    known = [row for row in rows if row["known"] == "true"]
    np.testing.assert_allclose([float(row["score"]) for row in known], expected, atol=1e-5)
    np.testing.assert_allclose([float(row["probability"]) for row in known], 1 / (1 + np.exp(-expected)), atol=1e-5)
    told = b"7 pairs; 1 with an unknown user and 1 with an unknown item; 2 without a usable id (without a score)"
    assert told in printed.err
    assert printed.err.startswith(f"checkpoint: {trained_run}/checkpoints/step-".encode())


@pytest.mark.parametrize("unknown", ["prior", "drop"])
def test_unknown_pairs_by_another_rule(
    trained_run: Path, pairs: Path, capfdbinary: pytest.CaptureFixture[bytes], unknown: str
) -> None:
    assert _score(trained_run, "--input", pairs, "--unknown", unknown) == 0
    rows = _printed(capfdbinary.readouterr().out)
    if unknown == "drop":
        assert [row["item"] for row in rows] == ["5", "6", "8"]
    else:
        assert [row["known"] == "true" for row in rows] == KNOWN
        assert len({row["score"] for row in rows if row["known"] == "false"} - {""}) == 1


def test_a_folder_of_scores(
    trained_run: Path, pairs: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert _score(trained_run, "--input", pairs) == 0
    rows = _printed(capfdbinary.readouterr().out)
    given = ("--input", pairs, "--output", tmp_path / "out", "--format", "jsonl")
    assert _score(trained_run, *given) == 0
    written = [json.loads(line) for line in (tmp_path / "out" / "scores.jsonl").read_text().splitlines()]
    assert [row["score"] is not None for row in written] == KNOWN
    expected = [float(row["score"]) if row["score"] else None for row in rows]
    assert [row["score"] for row in written] == pytest.approx(expected, abs=1e-6)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["rows"], manifest["counts"]["scored"], manifest["counts"]["unreadable"]) == (7, 3, 2)
    assert f"step-{manifest['checkpoint']['step']:09d}" in {f.name for f in (trained_run / "checkpoints").iterdir()}
    assert _score(trained_run, *given) == 2
    assert b"is already there" in capfdbinary.readouterr().err


def test_a_bad_input_leaves_nothing(trained_run: Path, tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("user,item\n1,2\n1,2,3\n")
    assert _score(trained_run, "--input", tmp_path / "p.csv", "--output", tmp_path / "out") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["p.csv"]
