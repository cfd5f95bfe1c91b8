"""`invdist prepare` as people type it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from invdist.cli.prepare import main
from invdist.data.dataset import Dataset


def test_synthetic_in_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "deep" / "data"
    assert main(["synthetic", "--output", str(output), "preset=tiny", "label_fraction=0.5", "seed=3"]) == 0
    printed = capsys.readouterr().out
    dataset = Dataset.open(str(output))
    for name in ("users", "items", "positives", "negatives", "unclear", "density"):
        assert name in printed
    assert f"{dataset.summary['positives']:,}" in printed
    manifest = json.loads((output / "dataset.json").read_text())
    assert manifest["cut"]["label_fraction"] == 0.5
    assert manifest["cut"]["seed"] == 3
    assert manifest["source"]["preset"] == "tiny"
    assert manifest["counts"]["hidden_labels"] == 1800
    truth = dataset.read("truth")["truth"].to_numpy()
    assert np.count_nonzero((truth == 0) | (truth == 1)) == 1800


def test_options_from_a_file_and_after_inputs(tmp_path: Path):
    rows = "".join(f"{n % 30},{n},{n % 5 + 1}\n" for n in range(300))
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("who,what,stars\n" + rows)
    (tmp_path / "options.yaml").write_text("columns: {user: who, item: what, rating: stars}\npositive_from: 4\n")
    inputs = ["--input", str(tmp_path / "a.csv"), str(tmp_path / "b.csv"), "negative_to=1"]
    config = ["--config", str(tmp_path / "options.yaml"), "--output", str(tmp_path / "out")]
    assert main(["ratings", *config, *inputs]) == 0
    dataset = Dataset.open(str(tmp_path / "out"))
    assert (dataset.summary["positives"], dataset.summary["negatives"], dataset.rows["unclear"]) == (120, 60, 120)
    assert dataset.manifest["counts"]["exact_duplicates"] == 300


def test_dates_in_a_file_need_no_quotes(tmp_path: Path):
    rows = "".join(f"{n % 30},{n},{n % 5 + 1},2024-01-0{n % 3 + 1}\n" for n in range(300))
    (tmp_path / "log.csv").write_text("user,item,rating,date\n" + rows)
    (tmp_path / "options.yaml").write_text("split: date\nvalid_from: 2024-01-02\ntest_from: 2024-01-03\n")
    arguments = ["--input", str(tmp_path / "log.csv"), "--config", str(tmp_path / "options.yaml")]
    assert main(["ratings", *arguments, "--output", str(tmp_path / "out")]) == 0
    rows = Dataset.open(str(tmp_path / "out")).rows
    assert (rows["train"] + rows["training_test"], rows["valid"], rows["test"]) == (100, 100, 100)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["movies"], "'movies' is no kind of log; expected ml-1m, kuairand"),
        (["ratings"], "ratings needs inputs"),
        (["synthetic", "--input", "x"], "synthetic takes no --input"),
        (["synthetic", "preset=huge"], "preset: expected one of tiny, small, microvideo, not 'huge'"),
        (["synthetic", "pre=tiny"], "pre: no such key"),
        (["synthetic", "label_fraction=0"], "label_fraction: expected a number above 0 and at most 1"),
        (["synthetic", "valid_fraction=0.6", "test_fraction=0.4"], "leaves nothing to train on"),
        (["synthetic", "split=given"], "split=given goes together with valid_file"),
        (["synthetic", "valid_file=x"], "split=given goes together with valid_file"),
        (["synthetic", "split=date"], "split=date goes together with valid_from=YYYY-MM-DD"),
        (["synthetic", "valid_from=2022-04-25"], "split=date goes together with valid_from=YYYY-MM-DD"),
        (["synthetic", "split=date", "valid_from=april", "test_from=may"], "expected dates as 2022-04-25, not 'april'"),
        (
            ["synthetic", "split=date", "valid_from=2022-04-25", "test_from=2022-04-25"],
            "test_from: expected a later day",
        ),
        (["synthetic", "split=date", "valid_from=2022-04-25", "test_from=2022-04-26"], "needs a log with dates"),
        (["synthetic", "rule=mood"], "rule: expected"),
        (["synthetic", "rule=label"], "rule: expected"),
        (["synthetic", "finish_below=0.9"], "finish_below: expected below finish_above"),
        (["ratings", "negative_to=4", "--input", "x.csv"], "negative_to: expected below positive_from"),
        (["ratings", "--input", "x.csv"], "x.csv is not there"),
        (["ml-1m", "--input", "a", "b"], "ml-1m takes one --input"),
        (["synthetic", "--config", "none.yaml"], "none.yaml"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
):
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert "Traceback" not in error
    assert not list(tmp_path.iterdir())


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as done:
        main(["--help"])
    assert done.value.code == 0
    shown = capsys.readouterr().out
    for option in ("label_fraction", "columns.play_time", "positive_from", "preset", "duplicates"):
        assert option in shown
