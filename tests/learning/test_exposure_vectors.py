"""Exposure vectors compared with a truncated SVD by scipy, at several numbers of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse as sp
import torch
from scipy.sparse.linalg import svds

from invdist.data.dataset import Dataset
from invdist.data.stream.exposures import EXPOSED, ExposurePairs
from invdist.embeddings.comm import Comm
from invdist.embeddings.placement import Table
from invdist.embeddings.row_optimizers import NoOptimizer
from invdist.embeddings.store import EmbeddingStore
from invdist.embeddings.tables import shard_tables
from invdist.learning.exposure_vectors import SubspaceIteration, iteration_columns
from tests.distributed import run_ranks

DIM, PRODUCTS = 8, 200  # enough to converge on data whose singular values are close


def _learn(rank: int, size: int, path: str) -> dict[str, np.ndarray]:
    dataset, comm = Dataset.open(path), Comm()
    tables = tuple(
        Table(name, rows, iteration_columns(DIM)) for name, rows in (("user", dataset.users), ("item", dataset.items))
    )
    placed = shard_tables(tables, "row_wise", device=torch.device("cpu"), batch_size=1024, hbm_gb=1, ddr_gb=1)
    iteration = SubspaceIteration(EmbeddingStore(placed, comm, lambda rows, store: NoOptimizer()), DIM)
    pairs = ExposurePairs(dataset, rank, size, batch_rows=1)
    labeled = ExposurePairs(dataset, rank, size, ("train", "training_test"))
    iteration.start(pairs.batches(), labeled.batches(), seed=0)
    for product in range(PRODUCTS):
        iteration.product("user" if product % 2 == 0 else "item", pairs.batches())
    iteration.product("user", pairs.batches(), last=True)
    return {name: iteration.vectors(name).numpy() for name in ("user", "item")}


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


def test_they_are_those_of_a_truncated_svd(tiny_data: Path, by_ranks: dict[int, dict[str, np.ndarray]]) -> None:
    dataset = Dataset.open(str(tiny_data))
    shown = _matrix(dataset)
    by_user, by_item = (np.asarray(shown.sum(axis)).ravel() for axis in (1, 0))
    left, values, right = svds(sp.diags((by_user + 5) ** -0.5) @ shown @ sp.diags((by_item + 5) ** -0.5), k=DIM)
    assert left is not None
    assert right is not None
    expected = {"user": left * values, "item": right.T * values}
    for name, counts in (("user", by_user), ("item", by_item)):
        found = by_ranks[1][name]
        # Cosines between rows do not depend on signs and rotations of columns.
        cosines, wanted = (x @ x.T for x in (_unit(found[:, :DIM]), _unit(expected[name] * (counts > 0)[:, None])))
        np.testing.assert_allclose(cosines, wanted, atol=2e-3)
        np.testing.assert_allclose(found[:, DIM], np.log1p(counts), rtol=1e-6)
        labels = pa.concat_tables(dataset.read(split, [name]) for split in ("train", "training_test"))[name].to_numpy()
        np.testing.assert_array_equal(found[:, DIM + 1], np.bincount(labels, minlength=len(found)))
        assert not found[:, DIM + 2 :].any()


@pytest.mark.parametrize("size", [2, 3])
def test_any_number_of_ranks_finds_the_same(by_ranks: dict[int, dict[str, np.ndarray]], size: int) -> None:
    for name, found in by_ranks[size].items():
        np.testing.assert_allclose(found, by_ranks[1][name], atol=2e-4)


def test_a_data_set_with_fewer_items_than_columns_is_no_obstacle(tmp_path: Path) -> None:
    from invdist.data.prepare.labeling import Labeling
    from invdist.data.prepare.options import Options
    from invdist.data.prepare.pipeline import prepare
    from invdist.data.prepare.synthetic import Scale, SyntheticLog

    scale = Scale(users=60, items=16, labeled_rows=160)
    prepare(SyntheticLog("few", scale, 0), Labeling(rules=("finish_rate",)), Options(), tmp_path / "few")
    found = run_ranks(_learn, 1, str(tmp_path / "few"))[0]
    assert np.isfinite(found["user"]).all()
    assert np.isfinite(found["item"]).all()
    assert (np.linalg.norm(found["item"][:, :DIM], axis=1) > 0).any()
