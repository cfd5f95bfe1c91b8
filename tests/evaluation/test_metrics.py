"""Metrics against scikit-learn, enumeration and closed forms."""

from __future__ import annotations

import argparse
import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from sklearn.metrics import log_loss, ndcg_score, roc_auc_score

from invdist.bench import metrics as bench
from invdist.evaluation.metrics import ranking_metrics
from invdist.runtime.errors import UserError

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]


@st.composite
def scored_rows(draw: st.DrawFn) -> Rows:
    """Both classes, users of one class, scores from 'nearly all tied' to 'no ties', float32 or float64."""
    rows = draw(st.integers(2, 120))
    users = draw(st.integers(1, 25))
    levels = draw(st.sampled_from([1, 2, 5, 30, 10**6]))
    share = draw(st.sampled_from([0.1, 0.5, 0.9]))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    label = (random.random(rows) < share).astype(draw(st.sampled_from([np.int8, np.float32])))
    label[:2] = 0, 1
    score = (random.integers(levels, size=rows) - levels / 2) / levels * draw(st.sampled_from([1.0, 20.0]))
    user = random.integers(users, size=rows) * draw(st.sampled_from([1, 2**31 // 25]))
    return user, label, score.astype(draw(st.sampled_from([np.float32, np.float64])))


def judged_users(rows: Rows) -> list[tuple[np.ndarray, np.ndarray]]:
    user, label, score = rows
    parts = [(label[user == u], score[user == u]) for u in np.unique(user)]
    return [(y, s) for y, s in parts if len(np.unique(y)) == 2]


@settings(max_examples=150, deadline=None)
@given(scored_rows(), st.sampled_from([1, 3, 10, 500]))
def test_agrees_with_scikit_learn(rows: Rows, k: int) -> None:
    user, label, score = rows
    got = ranking_metrics(user, label, score, k=k)
    judged = judged_users(rows)
    probability = 1 / (1 + np.exp(-score.astype(np.float64)))

    assert got["auc"] == pytest.approx(roc_auc_score(label, score), abs=1e-12)
    assert got["logloss"] == pytest.approx(log_loss(label, probability), rel=1e-9)
    assert got["rows"] == len(user)
    assert got["users"] == len(np.unique(user))
    assert got["users_left_out"] == len(np.unique(user)) - len(judged)
    if not judged:
        assert all(math.isnan(got[name]) for name in ("gauc", "gauc_weighted", "ndcg", "mrr"))
        return
    aucs = [roc_auc_score(y, s) for y, s in judged]
    assert got["gauc"] == pytest.approx(np.mean(aucs), abs=1e-12)
    assert got["gauc_weighted"] == pytest.approx(np.average(aucs, weights=[len(y) for y, _ in judged]), abs=1e-12)
    assert got["ndcg"] == pytest.approx(np.mean([ndcg_score([y], [s], k=k) for y, s in judged]), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(scored_rows())
def test_calibration_error_agrees_with_scikit_learns_bins(rows: Rows) -> None:
    user, label, score = rows
    score = score + 1e-4  # off the bin edges, where scikit-learn's bins are closed on the other side
    probability = 1 / (1 + np.exp(-score.astype(np.float64)))
    share, mean = calibration_curve(label, probability, n_bins=15)
    size = np.histogram(probability, bins=15, range=(0, 1))[0]
    expected = np.abs(share - mean) @ size[size > 0] / len(label)
    assert ranking_metrics(user, label, score)["ece"] == pytest.approx(expected, abs=1e-7)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2)), min_size=2, max_size=6))
def test_mrr_is_the_mean_over_all_orders_of_tied_rows(rows: list[tuple[int, int]]) -> None:
    label, score = map(np.array, zip(*rows, strict=True))
    label[:2] = 0, 1
    ranks = []
    for order in itertools.permutations(range(len(label))):
        if all(score[a] >= score[b] for a, b in itertools.pairwise(order)):
            ranks.append(1 / (1 + min(place for place, row in enumerate(order) if label[row])))
    got = ranking_metrics(np.zeros(len(label), dtype=int), label, score.astype(float))
    assert got["mrr"] == pytest.approx(np.mean(ranks), abs=1e-12)


def test_mrr_of_a_large_tie_has_its_closed_form() -> None:
    # One positive among n tied rows: the mean of 1/x for x = 1..n. Enumeration cannot reach this size.
    rows = 20_000
    label = np.zeros(rows, dtype=int)
    label[7] = 1
    got = ranking_metrics(np.zeros(rows, dtype=int), label, np.zeros(rows))
    assert got["mrr"] == pytest.approx(np.mean(1 / np.arange(1, rows + 1)), rel=1e-8)
    assert got["auc"] == 0.5


def test_extreme_logits_keep_log_loss_finite_and_exact() -> None:
    user, label = np.zeros(4, dtype=int), np.array([1, 0, 1, 0])
    score = np.array([1e4, -1e4, -1e4, 1e4], dtype=np.float32)
    assert ranking_metrics(user, label, score)["logloss"] == pytest.approx(5e3)
    assert ranking_metrics(user, label, np.array([50.0, -50, 50, -50]))["logloss"] == pytest.approx(math.exp(-50))


def test_negative_zero_ties_with_zero() -> None:
    assert ranking_metrics(np.zeros(2, dtype=int), np.array([0, 1]), np.array([0.0, -0.0]))["auc"] == 0.5


def test_order_of_rows_does_not_matter() -> None:
    random = np.random.default_rng(1)
    user, label = random.integers(50, size=3000), random.integers(2, size=3000)
    score = random.integers(40, size=3000) / 8
    order = random.permutation(3000)
    assert ranking_metrics(user[order], label[order], score[order]) == pytest.approx(
        ranking_metrics(user, label, score)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score": [0.1, math.nan, 0.3]}, "score of row 1 is nan"),
        ({"score": [0.1, 0.2, math.inf]}, "score of row 2 is inf"),
        ({"label": [0, 1, 2]}, "label of row 2 is 2"),
        ({"label": [1, 1, 1]}, "all 3 rows are labeled 1"),
        ({"label": [0, 0, 0]}, "all 3 rows are labeled 0"),
        ({"user": [1, 2]}, "of one length"),
        ({"user": [0.5, 1, 2]}, "user must be integers"),
        ({"user": [], "label": [], "score": []}, "no rows"),
        ({"k": 0}, "at least 1"),
    ],
)
def test_refuses_what_has_no_answer(change: dict, message: str) -> None:
    rows = {"user": [1, 1, 2], "label": [0, 1, 1], "score": [0.1, 0.2, 0.3], "k": 10, **change}
    with pytest.raises(UserError, match=message):
        ranking_metrics(*(np.array(rows[name]) for name in ("user", "label", "score")), k=rows["k"])


def test_two_million_rows_take_three_seconds_of_one_core_at_most() -> None:
    random = np.random.default_rng(2)
    user, label = random.integers(37_692, size=2_000_000), random.integers(2, size=2_000_000)
    score = random.normal(size=2_000_000).astype(np.float32)
    started = time.process_time()  # not wall time: other tests may have the machine
    ranking_metrics(user, label, score)
    assert time.process_time() - started <= 3


def test_bench_agrees_with_scikit_learn_on_its_rows() -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    figures = bench.run(parser.parse_args(["--rows", "3000", "--users", "40", "--repeats", "1"]))
    assert {"seconds", "sklearn_seconds", "sklearn_covers"} <= figures.keys()
    assert figures["auc_difference"] == pytest.approx(0, abs=1e-12)
    assert figures["gauc_difference"] == pytest.approx(0, abs=1e-12)
