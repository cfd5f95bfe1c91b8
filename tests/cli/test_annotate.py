"""`invdist annotate`: soft labels against the formula, on Ray as in one process, continued after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import f1_score, precision_score, recall_score, roc_auc_score

from invdist.cli import annotate, prepare
from invdist.data.dataset import Dataset
from invdist.runtime.private_ray import PrivateRay
from invdist.serving.calibration import first_half
from tests.conftest import REPOSITORY
from tests.runs import scores_of_training

COLUMNS = ["user", "item", "score", "w1", "w0", "label", "confidence", "known"]


def _manifest(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def _table(folder: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(folder / shard["file"]) for shard in _manifest(folder)["shards"]])


def _annotate(*arguments: str | Path) -> int:
    return annotate.main([*map(str, arguments), "--workers", "0"])


def _pairs(folder: Path, rows: int = 1000, group: int = 50) -> Path:
    """A log of raw pairs; every tenth user and every twentieth item is unknown."""
    user = np.where(np.arange(rows) % 10 == 9, 10_000, np.arange(rows) % 200)
    item = np.where(np.arange(rows) % 20 == 19, 20_000, np.arange(rows) % 300)
    pq.write_table(pa.table({"user": user, "item": item}), folder / "pairs.parquet", row_group_size=group)
    return folder / "pairs.parquet"


@pytest.fixture(scope="module")
def annotated(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unclear exposures of the run's data set."""
    folder = tmp_path_factory.mktemp("annotated") / "out"
    assert _annotate("--run", trained_run, "--output", folder) == 0
    return folder


def test_annotations_are_the_paper_s_formula_of_the_model_s_scores(
    annotated: Path, trained_run: Path, tiny_data: Path
) -> None:
    table = _table(annotated)
    assert table.column_names == COLUMNS
    unclear = Dataset.open(str(tiny_data)).read("unclear")
    scores = scores_of_training(trained_run, unclear["user"].to_numpy(), unclear["item"].to_numpy())
    s = scores.astype(np.float64)
    l1, l0 = np.logaddexp(0, -s), np.logaddexp(0, s)
    w1 = (l0 / l1) / (l0 / l1 + l1 / l0)
    np.testing.assert_allclose(table["score"].to_numpy(), scores, atol=1e-6)
    np.testing.assert_allclose(table["w1"].to_numpy(), w1, atol=1e-6)
    np.testing.assert_allclose(table["w0"].to_numpy(), 1 - w1, atol=1e-6)
    np.testing.assert_allclose(table["confidence"].to_numpy(), np.abs(2 * w1 - 1), atol=1e-5)
    assert table["label"].to_pylist() == [int(weight >= 0.5) for weight in table["w1"].to_pylist()]
    # Synthetic raw ids are the indices.
    assert table["user"].to_pylist() == unclear["user"].to_pylist()


def test_the_auc_against_truth_is_that_of_scikit_learn(annotated: Path, tiny_data: Path) -> None:
    truth = Dataset.open(str(tiny_data)).read("truth")["truth"].to_numpy()
    expected = roc_auc_score(truth >= 0.5, _table(annotated)["score"].to_numpy())
    assert _manifest(annotated)["auc"] == pytest.approx(expected, abs=1e-9)
    assert expected > 0.6  # the labels it learned from are of the same users and items


def test_a_calibrated_threshold_is_measured_on_rows_it_was_not_chosen_on(
    trained_run: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = Dataset.open(str(tiny_data))
    pairs = dataset.read("valid")
    pq.write_table(pairs.select(["user", "item"]), tmp_path / "p.parquet")
    given = ("--run", trained_run, "--input", tmp_path / "p.parquet", "--output", tmp_path / "out")
    assert _annotate(*given, "--calibrate", "--precision", "0.75") == 0
    figures = _manifest(tmp_path / "out")["calibration"]
    label, called = pairs["label"].to_numpy(), _table(tmp_path / "out")["label"].to_numpy()
    user, item = (pairs[name].to_numpy().astype(np.int64) for name in ("user", "item"))
    half = first_half(user, item, dataset.items)
    for rows, name in ((half, "chosen_on"), (~half, "measured_on")):
        assert figures[name]["rows"] == rows.sum() > 100
        assert figures[name]["precision"] == pytest.approx(precision_score(label[rows], called[rows]))
        assert figures[name]["recall"] == pytest.approx(recall_score(label[rows], called[rows]))
        assert figures[name]["f1"] == pytest.approx(f1_score(label[rows], called[rows]))
    assert figures["chosen_on"]["precision"] >= 0.75
    measured = figures["measured_on"]
    printed = capsys.readouterr().out
    assert f"precision {measured['precision']:.4f}, recall {measured['recall']:.4f}" in printed
    assert "measured on" in printed


def test_unknown_pairs_have_a_row_without_a_label(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = _pairs(tmp_path)
    assert _annotate("--run", trained_run, "--input", log, "--output", tmp_path / "out") == 0
    counts, table = _manifest(tmp_path / "out")["counts"], _table(tmp_path / "out")
    assert (counts["rows"], counts["unknown_users"], counts["unknown_items"]) == (1000, 100, 50)
    assert table.select(["user", "item"]).equals(pq.read_table(log))
    known = np.arange(1000) % 10 != 9
    assert counts["annotated"] == known.sum() == 900
    for name in ("score", "w1", "w0", "label", "confidence"):
        np.testing.assert_array_equal(table[name].is_valid().to_numpy(), known)
    assert table["known"].to_pylist() == known.tolist()
    told = "100 with an unknown user and 50 with an unknown item (without a score)"
    assert told in capsys.readouterr().out


def test_unknown_pairs_can_be_left_out(trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--run", trained_run, "--input", _pairs(tmp_path), "--output", tmp_path / "out")
    assert _annotate(*given, "--unknown", "drop") == 0
    counts = _manifest(tmp_path / "out")["counts"]
    assert counts["annotated"] == counts["written"] == len(_table(tmp_path / "out")) == 900
    assert "100 with an unknown user and 50 with an unknown item (left out)" in capsys.readouterr().out


def test_unknown_pairs_can_be_scored_by_the_prior(trained_run: Path, tmp_path: Path) -> None:
    given = ("--run", trained_run, "--input", _pairs(tmp_path), "--output", tmp_path / "out")
    assert _annotate(*given, "--unknown", "prior") == 0
    table = _table(tmp_path / "out")
    known = table["known"].to_numpy(zero_copy_only=False)
    assert len(table) == 1000
    assert known.sum() == 900
    assert len(set(table["score"].to_numpy()[~known].tolist())) == 1
    assert table["user"].to_pylist()[9] == 10_000


def test_a_full_disk_is_reported_with_what_is_kept(trained_run: Path, tmp_path: Path) -> None:
    log = _pairs(tmp_path, 40_000, 20_000)
    given = [
        "--run",
        trained_run,
        "--input",
        log,
        "--output",
        tmp_path / "out",
        "--part-rows",
        "20000",
        "--workers",
        "0",
    ]
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000)); "
        "from invdist.cli.annotate import main; sys.exit(main(sys.argv[1:]))"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, given)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert "no room on the disk" in done.stderr
    assert f"finished parts are kept in {tmp_path / 'out'}.partial: repeat the command to continue" in done.stderr
    assert not list((tmp_path / "out.partial").glob(".*"))
    assert annotate.main(list(map(str, given))) == 0
    assert len(_table(tmp_path / "out")) == 40_000


def test_ray_gives_the_same_as_one_process(ray_cluster: PrivateRay, trained_run: Path, tmp_path: Path) -> None:
    given = ("--run", trained_run, "--input", _pairs(tmp_path), "--part-rows", "100")
    assert _annotate(*given, "--output", tmp_path / "here") == 0
    assert annotate.main([*map(str, given), "--output", str(tmp_path / "ray"), "--workers", "2"]) == 0
    assert len(_manifest(tmp_path / "ray")["shards"]) == 10
    assert _table(tmp_path / "ray").equals(_table(tmp_path / "here"))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "p.csv").write_text('user,item\n1,2\n1,2,3,"\n')
    given = ("--run", trained_run, "--input", tmp_path / "bad", "--output", tmp_path / "no")
    assert annotate.main([*map(str, given), "--workers", "1"]) == 2


def test_after_a_kill_the_same_command_finishes_what_is_left(
    ray_cluster: PrivateRay, trained_run: Path, tmp_path: Path
) -> None:
    given = ["--run", str(trained_run), "--input", str(_pairs(tmp_path, 4000, 10)), "--part-rows", "10"]
    command = [sys.executable, "-m", "invdist", "annotate", *given, "--output", str(tmp_path / "out"), "--workers", "1"]
    environment = os.environ | {"RAY_ADDRESS": ray_cluster.address, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    partial, deadline = tmp_path / "out.partial", time.monotonic() + 120
    while not list(partial.glob("*.parquet")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
    while ray_cluster_writes(partial):
        time.sleep(0.2)
    before = {file.name: file.stat().st_mtime_ns for file in partial.glob("*.parquet")}
    assert 0 < len(before) < 400
    (partial / "part-00399.parquet").write_bytes(b"PAR1 torn")

    assert _annotate(*given, "--output", tmp_path / "out") == 0
    assert _annotate(*given, "--output", tmp_path / "whole") == 0
    assert _table(tmp_path / "out").equals(_table(tmp_path / "whole"))
    assert _manifest(tmp_path / "out")["counts"] == _manifest(tmp_path / "whole")["counts"]
    kept = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in before if name != "part-00399.parquet"}
    assert kept.items() <= before.items()
    assert not list((tmp_path / "out").glob("*unfinished*"))


def ray_cluster_writes(folder: Path) -> bool:
    """Whether the workers of a killed driver still write: Ray ends them a moment later."""
    before = sorted(file.name for file in folder.iterdir())
    time.sleep(1.0)
    return sorted(file.name for file in folder.iterdir()) != before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--calibrate", "--threshold", "0.4"], "both choose the threshold"),
        (["--precision", "0.4"], "--precision says how --calibrate chooses"),
        (["--threshold", "1.5"], "--threshold 1.5: expected 0 to 1"),
        (["--part-rows", "0"], "--part-rows 0: expected at least 1"),
        (["--input", "no/such.csv"], "no/such.csv is not there"),
    ],
)
def test_arguments_that_cannot_be(
    trained_run: Path, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _annotate("--run", trained_run, "--output", tmp_path / "out", *arguments) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_exists_and_the_data_set_of_another_run(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _annotate("--run", trained_run, "--output", tmp_path) == 2
    assert "is already there; choose another --output or remove it first" in capsys.readouterr().err
    other = tmp_path / "other"
    assert prepare.main(["synthetic", "--output", str(other), "preset=tiny", "seed=1"]) == 0
    assert _annotate("--run", trained_run, "--input", other, "--output", tmp_path / "out") == 2
    assert "is another data set than the one" in capsys.readouterr().err
