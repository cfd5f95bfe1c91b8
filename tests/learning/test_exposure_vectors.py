"""Exposure vectors compared with a truncated SVD by scipy, at several numbers of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse as sp
import torch
from scipy.sparse.linalg import svds
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from invdist.data.dataset import Dataset
from invdist.data.prepare.labeling import Labeling
from invdist.data.prepare.options import Options
from invdist.data.prepare.pipeline import prepare
from invdist.data.prepare.synthetic import Scale, SyntheticLog
from invdist.data.stream.exposures import EXPOSED, ExposurePairs
from invdist.embeddings.comm import Comm
from invdist.embeddings.placement import Table
from invdist.embeddings.row_optimizers import NoOptimizer
from invdist.embeddings.store import EmbeddingStore
from invdist.embeddings.tables import shard_tables
from invdist.learning.exposure_vectors import PADDING, Shrinking, SubspaceIteration, count_pairs, iteration_columns
from tests.distributed import run_ranks
from tests.learning.dense_vectors import dense_vectors

DIM, PRODUCTS = 8, 200  # enough to converge on data whose singular values are close


def _learn(
    rank: int, size: int, path: str, dim: int = DIM, products: int = PRODUCTS, shrink: Shrinking = None
) -> dict[str, np.ndarray]:
    dataset, comm = Dataset.open(path), Comm()

    def store_of(columns: int) -> EmbeddingStore:
        tables = tuple(Table(name, rows, columns) for name, rows in (("user", dataset.users), ("item", dataset.items)))
        placed = shard_tables(tables, "row_wise", device=torch.device("cpu"), batch_size=1024, hbm_gb=1, ddr_gb=1)
        return EmbeddingStore(placed, comm, lambda rows, store: NoOptimizer())

    iteration = SubspaceIteration(store_of(iteration_columns(dim)), dim)
    pairs = ExposurePairs(dataset, rank, size, batch_rows=1)
    labeled = ExposurePairs(dataset, rank, size, ("train", "training_test"))
    iteration.start(count_pairs(store_of(PADDING), pairs.batches(), labeled.batches()), seed=0)
    for product in range(products):
        iteration.product("user" if product % 2 == 0 else "item", pairs.batches())
    iteration.product("user", pairs.batches(), last=True)
    return {name: iteration.vectors(name, shrink=shrink).numpy() for name in ("user", "item")}


@pytest.fixture(scope="module")
def by_ranks(tiny_data: Path) -> dict[int, dict[str, np.ndarray]]:
    found = {}
    for size in (1, 2, 3):
        parts = run_ranks(_learn, size, str(tiny_data))
        found[size] = {name: np.concatenate([part[name] for part in parts]) for name in ("user", "item")}
    return found


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def _matrix(dataset: Dataset) -> sp.csr_matrix:
    tables = [dataset.read(split, ["user", "item"]) for split in EXPOSED]
    user, item = (np.concatenate([table[name].to_numpy() for table in tables]) for name in ("user", "item"))
    return sp.csr_matrix((np.ones(len(user)), (user, item)), (dataset.users, dataset.items))


def _by_scipy(dataset: Dataset, dim: int) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Vectors of users and items by `svds`, and how often each user and item was shown."""
    shown = _matrix(dataset)
    by_user, by_item = (np.asarray(shown.sum(axis)).ravel() for axis in (1, 0))
    left, values, right = svds(sp.diags((by_user + 5) ** -0.5) @ shown @ sp.diags((by_item + 5) ** -0.5), k=dim)
    assert left is not None
    assert right is not None
    return {"user": left * values, "item": right.T * values}, by_user, by_item


def test_they_are_those_of_a_truncated_svd(tiny_data: Path, by_ranks: dict[int, dict[str, np.ndarray]]) -> None:
    dataset = Dataset.open(str(tiny_data))
    expected, by_user, by_item = _by_scipy(dataset, DIM)
    for name, counts in (("user", by_user), ("item", by_item)):
        found = by_ranks[1][name]
        # Cosines between rows do not depend on signs and rotations of columns.
        cosines, wanted = (x @ x.T for x in (_unit(found[:, :DIM]), _unit(expected[name] * (counts > 0)[:, None])))
        np.testing.assert_allclose(cosines, wanted, atol=2e-3)
        np.testing.assert_allclose(found[:, DIM], np.log1p(counts), rtol=1e-6)
        labels = pa.concat_tables(dataset.read(split, [name]) for split in ("train", "training_test"))[name].to_numpy()
        np.testing.assert_array_equal(found[:, DIM + 1], np.bincount(labels, minlength=len(found)))
        assert not found[:, DIM + 2 :].any()


@pytest.mark.parametrize(
    ("shrink", "dim", "left"),
    [("smooth", 4, 4), ("smooth", 8, 8), ("step", 4, 3), ("step", 8, 8)],
    ids=["smooth", "smooth, most are below the edge", "step", "step, most are below the edge: all stay"],
)
def test_shrunk_ones_are_those_of_users_and_items_that_were_shown_five_average_exposures_more(
    tmp_path: Path, shrink: Shrinking, dim: int, left: int
) -> None:
    path = tmp_path / "feed"
    scale = Scale(users=200, items=160, labeled_rows=6_000, policy=0.9)
    prepare(SyntheticLog("feed", scale, 0), Labeling(rules=("finish_rate",)), Options(label_fraction=0.5), path)
    dataset = Dataset.open(str(path))
    parts = run_ranks(_learn, 2, str(path), dim, PRODUCTS, shrink)
    for name, wanted in zip(("user", "item"), dense_vectors(_matrix(dataset).toarray(), dim, shrink=shrink)[0]):
        assert np.linalg.matrix_rank(wanted) == left  # three columns are above the edge of chance
        found = np.concatenate([part[name] for part in parts])[:, :dim]
        np.testing.assert_allclose(found @ found.T, wanted @ wanted.T, atol=2e-3 * (wanted**2).sum(1).max())


@pytest.mark.parametrize("size", [2, 3])
def test_any_number_of_ranks_finds_the_same(by_ranks: dict[int, dict[str, np.ndarray]], size: int) -> None:
    for name, found in by_ranks[size].items():
        np.testing.assert_allclose(found, by_ranks[1][name], atol=2e-4)


def test_a_data_set_with_fewer_items_than_columns_is_no_obstacle(tmp_path: Path) -> None:
    scale = Scale(users=60, items=16, labeled_rows=160)
    prepare(SyntheticLog("few", scale, 0), Labeling(rules=("finish_rate",)), Options(), tmp_path / "few")
    found = run_ranks(_learn, 1, str(tmp_path / "few"))[0]
    assert np.isfinite(found["user"]).all()
    assert np.isfinite(found["item"]).all()
    assert (np.linalg.norm(found["item"][:, :DIM], axis=1) > 0).any()


def test_they_are_as_good_for_labels_as_those_of_scipy(tmp_path: Path) -> None:
    """With the usual number of products, on a feed whose exposures follow taste and whose labels are few."""
    dim, path = 16, tmp_path / "feed"
    scale = Scale(users=500, items=700, labeled_rows=40_000, policy=0.8)
    options = Options(label_fraction=0.1)
    prepare(SyntheticLog("feed", scale, 0), Labeling(rules=("finish_rate",)), options, path)
    dataset = Dataset.open(str(path))
    ours = {name: rows[:, :dim] for name, rows in run_ranks(_learn, 1, str(path), dim, 13)[0].items()}
    random = {name: np.random.default_rng(0).normal(size=rows.shape) for name, rows in ours.items()}
    auc = [_auc(dataset, vectors) for vectors in (ours, _by_scipy(dataset, dim)[0], random)]
    assert abs(auc[0] - auc[1]) < 0.01
    assert auc[0] > auc[2] + 0.05


def _auc(dataset: Dataset, vectors: dict[str, np.ndarray]) -> float:
    """Test AUC of a logistic regression on the products of unit vectors."""
    unit = {name: _unit(rows) for name, rows in vectors.items()}
    tables = {split: dataset.read(split) for split in ("train", "test")}
    x = {s: unit["user"][t["user"].to_numpy()] * unit["item"][t["item"].to_numpy()] for s, t in tables.items()}
    model = LogisticRegression(C=10.0, max_iter=500).fit(x["train"], tables["train"]["label"].to_numpy())
    return float(roc_auc_score(tables["test"]["label"].to_numpy(), model.decision_function(x["test"])))
