"""Commands over a run with exposure vectors, against the strategy that was trained scoring every pair."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from invdist.cli import annotate, export, recommend, score
from invdist.data.dataset import Dataset
from invdist.serving.run import open_run
from tests.runs import scores_of_training

KINDS = ["vectors", "neumf vectors"]


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest, run_of: Callable[[str], Path]) -> Path:
    return run_of(request.param)


@pytest.fixture(scope="module")
def every_score(run: Path, tiny_data: Path) -> np.ndarray:
    """Scores of all pairs `[users, items]`."""
    dataset = Dataset.open(str(tiny_data))
    pairs = np.divmod(np.arange(dataset.users * dataset.items), dataset.items)
    return scores_of_training(run, *pairs).reshape(dataset.users, dataset.items)


def test_recommendations_are_the_best_unseen_of_brute_force(
    run: Path, tiny_data: Path, every_score: np.ndarray, tmp_path: Path
) -> None:
    given = ["--run", str(run), "--k", "3", "--format", "parquet", "--output", str(tmp_path / "out")]
    assert recommend.main(given) == 0
    found = pq.read_table(tmp_path / "out" / "recommendations.parquet")
    left = every_score.copy()
    for split in ("train", "training_test"):
        table = Dataset.open(str(tiny_data)).read(split)
        left[table["user"].to_numpy(), table["item"].to_numpy()] = -np.inf
    expected = -np.sort(-left, axis=1)[:, :3].ravel()
    np.testing.assert_allclose(found["score"].to_numpy(), expected, atol=2e-5)
    user, item = found["user"].to_numpy(), found["item"].to_numpy()
    np.testing.assert_allclose(left[user, item], expected, atol=2e-5)


def test_scores_and_annotations_are_those_of_training(
    run: Path, tiny_data: Path, every_score: np.ndarray, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (tmp_path / "pairs.csv").write_text("user,item\n1,5\n2,6\n199,299\n77777,3\n")
    assert score.main(["--run", str(run), "--input", str(tmp_path / "pairs.csv"), "--unknown", "prior"]) == 0
    rows = list(csv.DictReader(io.StringIO(capfdbinary.readouterr().out.decode())))
    prior = open_run(run).prior
    expected = [every_score[1, 5], every_score[2, 6], every_score[199, 299], prior]
    np.testing.assert_allclose([float(row["score"]) for row in rows], expected, atol=2e-5)
    assert annotate.main(["--run", str(run), "--output", str(tmp_path / "out"), "--workers", "0"]) == 0
    shards = sorted((tmp_path / "out").rglob("*.parquet"))
    table = pa.concat_tables([pq.read_table(shard) for shard in shards])
    unclear = Dataset.open(str(tiny_data)).read("unclear")
    wanted = every_score[unclear["user"].to_numpy(), unclear["item"].to_numpy()]
    np.testing.assert_allclose(table["score"].to_numpy(), wanted, atol=2e-5)


def test_an_export_holds_the_columns_and_scores_alike(run: Path, every_score: np.ndarray, tmp_path: Path) -> None:
    import torch
    from safetensors.numpy import load_file

    assert export.main(["--run", str(run), "--output", str(tmp_path / "out")]) == 0
    program = torch.export.load(tmp_path / "out" / "scorer.pt2").module()
    user, item = torch.arange(200), torch.arange(200) + 50
    np.testing.assert_allclose(program(user, item).numpy(), every_score[user, item], atol=2e-5)
    rows = load_file(tmp_path / "out" / "model.safetensors")["item"]
    dim = open_run(run).config.exposures.dim
    lengths = np.linalg.norm(rows[:, -dim - 4 : -4], axis=1)
    shown = rows[:, -4] > 0
    assert shown.sum() > 250
    np.testing.assert_allclose(lengths[shown], 1, atol=1e-5)
    assert not lengths[~shown].any()


def test_users_without_a_label_are_told_apart_by_what_they_were_shown(run: Path) -> None:
    """As if user 0 to 9 were new: no label, so no trained columns; 5 to 9 were shown nothing either."""
    import torch

    model = open_run(run).model
    head = model.backbone
    new = model.user[:10].clone()
    new[:, : head.columns] = 0.0
    new[:, -3] = 0.0
    new[5:, head.columns :] = 0.0
    with torch.no_grad():
        scores = torch.stack([head(new, row.expand(10, -1)) for row in model.item[:20]])
    assert scores.isfinite().all()
    assert all(len(of_item[:5].unique()) == 5 for of_item in scores)
    torch.testing.assert_close(scores[:, 5:], scores[:, 5:6].expand(-1, 5), rtol=0, atol=1e-6)
