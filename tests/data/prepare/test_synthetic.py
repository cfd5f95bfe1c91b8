"""The synthetic feed keeps its promises: size, skew, and a truth that the log reflects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse
import scipy.sparse.linalg
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import normalize

from invdist.data.dataset import Dataset
from invdist.data.prepare.labeling import by_finish_rate
from invdist.data.prepare.options import Synthetic
from invdist.data.prepare.pipeline import prepare_log
from invdist.data.prepare.synthetic import PRESETS, Scale, SyntheticLog
from invdist.runtime.errors import UserError


@pytest.fixture(scope="module")
def small() -> dict[str, np.ndarray]:
    """The log of the small preset."""
    table = pa.Table.from_batches(SyntheticLog("small", PRESETS["small"], 0).batches())
    return {name: table[name].to_numpy() for name in table.column_names}


def test_presets_have_the_paper_s_size():
    assert PRESETS["microvideo"] == Scale(users=37_692, items=131_690, labeled_rows=9_462_492)


def test_exactly_the_labeled_rows_that_were_asked_for(small: dict[str, np.ndarray]):
    label = by_finish_rate(small["play_time"], small["duration"])
    assert np.count_nonzero(label >= 0) == 200_000
    assert np.mean(label[label >= 0]) == pytest.approx(0.678, abs=0.02)
    assert 0.3 < np.mean(label == -1) < 0.6
    pair = small["user"].astype(np.int64) * 3000 + small["item"]
    assert len(np.unique(pair)) == len(pair)
    assert set(small["user"].tolist()) == set(range(2000))


def test_activity_and_popularity_are_skewed(small: dict[str, np.ndarray]):
    for name, size, share in (("user", 2000, 0.25), ("item", 3000, 0.3)):
        counts = np.sort(np.bincount(small[name], minlength=size))[::-1]
        assert counts[: size // 10].sum() > share * counts.sum()
        assert counts[-size // 2 :].sum() < 0.35 * counts.sum()


def test_the_log_reflects_the_truth(small: dict[str, np.ndarray]):
    label = by_finish_rate(small["play_time"], small["duration"])
    clear = label >= 0
    truth = small["truth"]
    assert roc_auc_score(label[clear], truth[clear]) > 0.8
    # The policy shows what it believes is liked: exposures are better than random pairs.
    world = SyntheticLog("small", PRESETS["small"], 0).world
    rng = np.random.default_rng(0)
    random = 1 / (1 + np.exp(-world.logit(rng.integers(0, 2000, 20_000), rng.integers(0, 3000, 20_000))))
    assert truth.mean() > random.mean() + 0.05
    for name, better in (("like", True), ("hate", False)):
        given = small[name] > 0
        assert 0.0002 < given.mean() < 0.05
        assert (truth[given].mean() > truth.mean()) == better
        assert (np.mean(small["play_time"][given] / small["duration"][given]) > 0.5) == better


def test_there_is_more_to_learn_than_means(small: dict[str, np.ndarray]):
    label = by_finish_rate(small["play_time"], small["duration"])
    rows = np.flatnonzero(label >= 0)
    train, test = np.split(np.random.default_rng(0).permutation(rows), [int(0.6 * len(rows))])

    def log_odds(name: str, size: int) -> np.ndarray:
        key = small[name]
        mean = (np.bincount(key[train], label[train], size) + 5 * 0.68) / (np.bincount(key[train], minlength=size) + 5)
        return np.log(mean / (1 - mean))[key[test]]

    means = roc_auc_score(label[test], log_odds("user", 2000) + log_odds("item", 3000))
    assert 0.55 < means < roc_auc_score(label[test], small["truth"][test]) - 0.15


def test_exposures_tell_more_than_means_of_few_labels(tmp_path: Path):
    """The point of `small`: with one label in ten, vectors of who was shown what, without labels, beat the means."""
    assert prepare_log(Synthetic(preset="small"), [], tmp_path / "small")["cut"]["label_fraction"] == 0.1
    dataset = Dataset.open(str(tmp_path / "small"))
    assert dataset.rows == {"train": 10_800, "training_test": 1_200, "valid": 40_000, "test": 40_000} | {
        "unclear": dataset.rows["unclear"]
    }
    splits = [dataset.read(name).to_pydict() for name in ("train", "training_test", "test")]
    user, item, label = ([np.array(split[name]) for split in splits] for name in ("user", "item", "label"))
    train = [np.concatenate(column[:2]) for column in (user, item, label)]
    test = [column[2] for column in (user, item, label)]
    unclear = dataset.read("unclear")
    shown = [np.concatenate([unclear[name].to_numpy(), train[at]]) for at, name in enumerate(("user", "item"))]
    exposures = scipy.sparse.csr_matrix((np.ones(len(shown[0]), np.float32), shown), (2000, 3000))
    exposures = normalize(
        normalize(exposures, axis=1) @ scipy.sparse.diags(np.asarray(exposures.sum(0)).ravel().clip(1) ** -0.5)
    )
    factors: Any = scipy.sparse.linalg.svds(exposures, k=16, v0=np.ones(2000, np.float32))
    left, right = np.asarray(normalize(factors[0])), np.asarray(normalize(factors[2].T))

    def log_odds(at: int, size: int) -> np.ndarray:
        seen = np.bincount(train[at], minlength=size)
        mean = (np.bincount(train[at], train[2], size) + 20 * 0.68) / (seen + 20)
        return np.log(mean / (1 - mean))

    users, items = log_odds(0, 2000), log_odds(1, 3000)
    means = roc_auc_score(test[2], users[test[0]] + items[test[1]])
    head = LogisticRegression().fit(left[train[0]] * right[train[1]], train[2])
    vectors = roc_auc_score(test[2], head.decision_function(left[test[0]] * right[test[1]]))
    truth = roc_auc_score(test[2], dataset.true_preference(test[0], test[1]))
    assert 0.52 < means < vectors - 0.08 < truth - 0.15


def test_same_seed_same_log():
    first, again, other = (
        pa.Table.from_batches(SyntheticLog("tiny", PRESETS["tiny"], seed).batches()) for seed in (0, 0, 1)
    )
    assert first.equals(again)
    assert not first.equals(other)


def test_truth_of_unclear_rows_can_score_annotations(tiny: Path):
    truth = Dataset.open(str(tiny)).read("truth")["truth"].to_numpy()
    assert np.all((truth > 0) & (truth < 1))
    assert truth.std() > 0.15


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (Scale(users=10, items=10, labeled_rows=9), "at least one per user"),
        (Scale(users=10, items=12, labeled_rows=31), "at most a quarter of all pairs"),
        (Scale(users=1000, items=10, labeled_rows=2500), "at most a quarter of all pairs"),
    ],
)
def test_impossible_sizes(scale: Scale, message: str):
    with pytest.raises(UserError, match=message):
        SyntheticLog("x", scale, 0)


@pytest.mark.parametrize("users", [1, 7])
def test_any_size_works(users: int):
    scale = Scale(users=users, items=40, labeled_rows=users * 8)
    table = pa.Table.from_batches(SyntheticLog("x", scale, 0).batches())
    label = by_finish_rate(table["play_time"].to_numpy(), table["duration"].to_numpy())
    assert np.count_nonzero(label >= 0) == users * 8
