"""Exposure vectors that grow: those of a dense SVD up to a rotation, and the rotation is that of the older ones."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pytest
import torch
from scipy.linalg import orthogonal_procrustes

from invdist.config import Config
from invdist.data.dataset import Dataset
from invdist.data.prepare.options import build_options
from invdist.data.prepare.pipeline import prepare_log
from invdist.data.schema import OBSERVED_SPLITS, TRAINING_LABELED
from invdist.embeddings.comm import Comm
from invdist.runtime.process import single_rank
from invdist.training.growth import Parent, joined, settings_from
from invdist.training.vectors import finished_vectors, load_or_learn, vectors_folder
from tests.learning.dense_vectors import dense_vectors
from tests.runs import train_here

DIM, GROUPS = 4, 4
SETTINGS = ("method=none", "data.batch_size=64", "rows.dim=4", "training.epochs=1")
# No more columns than the groups have: all are above the edge of chance, so they are shrunk.
VECTORS = ("exposures.vectors=true", f"exposures.learned={DIM}", f"exposures.dim={DIM}", "exposures.products=8")


def _day(
    folder: Path, name: str, users: range, items: range, seed: int, onto: str | None = None, **more: Any
) -> Dataset:
    """Users are shown mostly items of their own group, some groups more than others."""
    rng = np.random.default_rng(seed)
    user, item = (a.ravel() for a in np.meshgrid(list(users), list(items), indexing="ij"))
    same = user % GROUPS == item % GROUPS
    shown = rng.random(len(user)) < np.where(same, np.array([0.9, 0.75, 0.6, 0.45])[user % GROUPS], 0.04)
    user, item = user[shown], item[shown]
    log = folder / f"{name}.csv"
    pc.write_csv(pa.table({"user": user, "item": item, "label": rng.integers(0, 2, len(user))}), log)
    options = build_options("ratings", {"rule": "label", "test_fraction": 0.0, **more})
    prepare_log(options, [log], folder / name, onto=folder / onto if onto else None)
    return Dataset.open(str(folder / name))


def _dense(dataset: Dataset, *, shrink: bool) -> list[np.ndarray]:
    """The vectors of the normalised exposures by a dense SVD."""
    shown = np.zeros((dataset.users, dataset.items))
    for split in OBSERVED_SPLITS:
        table = dataset.read(split)
        shown[table["user"].to_numpy(), table["item"].to_numpy()] = 1
    found, values = dense_vectors(shown, DIM, shrink="smooth" if shrink else None)
    assert values[DIM - 1] > 1.3 * values[DIM], "a subspace that is well defined"
    return found


def _vectors(config: Config, dataset: Dataset) -> list[np.ndarray]:
    """The vectors of users and items that a run reads, not yet of length one."""
    with single_rank():
        load_or_learn(config, dataset, device=torch.device("cpu"), comm=Comm())
    found = finished_vectors(vectors_folder(config, dataset), dataset)
    assert found is not None
    return [found.read(f"rows/{table}/weight").numpy()[:, :DIM].astype(np.float64) for table in ("user", "item")]


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


@pytest.fixture(scope="module", params=[True, False], ids=["shrunk", "plain"])
def grown(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Dataset, Dataset]:
    """The settings of a run that grows, its data set and the one before."""
    folder = tmp_path_factory.mktemp("grown")
    monday = _day(folder, "monday", range(120), range(80), 0)
    tuesday = _day(folder, "tuesday", range(60, 180), range(20, 100), 1, "monday")
    run = train_here(
        folder / "monday", folder / "runs/monday", *SETTINGS, *VECTORS, f"exposures.shrink={request.param}"
    )
    return settings_from(str(run), [f"data.path={tuesday.path}", "name=tuesday"]), tuesday, monday


@pytest.mark.parametrize(("products", "error"), [(3, 0.06), (10, 0.002)])
def test_from_the_older_vectors_it_comes_to_those_of_a_dense_svd(
    grown: tuple[Config, Dataset, Dataset], products: int, error: float
) -> None:
    config, tuesday, _ = grown
    config = config.model_copy(deep=True)
    assert config.growth.products == 3
    config.growth.products = products
    dense = _dense(tuesday, shrink=config.exposures.shrink)
    for found, wanted in zip(_vectors(config, tuesday), dense, strict=True):
        # Products of rows do not depend on a rotation of the columns.
        wanted = wanted @ wanted.T
        np.testing.assert_allclose(found @ found.T, wanted, rtol=0, atol=error * np.abs(wanted).max())


def test_they_are_turned_to_where_the_older_ones_were(grown: tuple[Config, Dataset, Dataset]) -> None:
    config, tuesday, monday = grown
    parent = Parent(config)
    before, after = _vectors(parent.config, monday), _vectors(config, tuesday)
    anew = config.model_copy(deep=True)
    anew.growth.run = anew.growth.checkpoint = None
    fresh = _vectors(anew, tuesday)
    for entity, old, new, turned in zip(("users", "items"), before, after, fresh, strict=True):
        source = joined(monday.raw_ids(entity), tuesday.raw_ids(entity))
        known = source >= 0
        assert np.count_nonzero(~known) > 0
        there, here = _unit(old[source[known]]), _unit(new[known])
        # Nothing is left to turn (scipy's Procrustes): what a head learned of a column is about the same column.
        np.testing.assert_allclose(orthogonal_procrustes(here, there)[0], np.eye(DIM), atol=1e-4)
        assert (here * there).sum(1).mean() > 0.9
        # The vectors of a run that starts anew span the same, turned in some other way.
        np.testing.assert_allclose(new @ new.T, turned @ turned.T, rtol=0, atol=0.02)


def test_labels_that_were_set_aside_still_count(grown: tuple[Config, Dataset, Dataset], tmp_path: Path) -> None:
    config, _, monday = grown
    shutil.copytree(monday.path, tmp_path / "monday")
    tuesday = _day(tmp_path, "tuesday", range(60, 180), range(20, 100), 1, "monday", keep=0, older="unclear", replay=0)
    config = config.model_copy(update={"data": config.data.model_copy(update={"path": tuesday.path})})
    _vectors(config, tuesday)
    found = finished_vectors(vectors_folder(config, tuesday), tuesday)
    assert found is not None
    users, counts, now = tuesday.raw_ids("users").to_pylist(), Counter(), Counter()
    for split in (*TRAINING_LABELED, "unclear"):
        table = tuesday.read(split)
        labeled = [users[user] for user, label in zip(*(table[n].to_pylist() for n in ("user", "label"))) if label >= 0]
        counts.update(labeled)
        now.update(labeled if split != "unclear" else [])
    assert sum(counts.values()) > sum(tuesday.rows[split] for split in TRAINING_LABELED)
    assert found.read("rows/user/weight")[:, DIM + 1].tolist() == [counts[user] for user in users]
    assert found.read("rows/user/weight")[:, DIM + 2].tolist() == [now[user] for user in users]
