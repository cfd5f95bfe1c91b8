"""The threshold against scikit-learn's precision-recall curve."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import f1_score, precision_recall_curve, precision_score, recall_score

from invdist.runtime.errors import UserError
from invdist.serving.annotation import soft_labels
from invdist.serving.calibration import calibrate, choose_threshold, first_half, quality
from invdist.serving.run import open_run
from invdist.serving.scoring import logits


def _rows(seed: int) -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(seed)
    label = (source.random(300) < 0.6).astype(np.int8)
    return np.round(0.5 + 0.2 * label + 0.2 * source.normal(size=300), 1).clip(0, 1).astype(np.float32), label


@pytest.mark.parametrize("seed", range(3))
def test_the_threshold_has_the_best_f1(seed: int) -> None:
    w1, label = _rows(seed)
    threshold = choose_threshold(w1, label)
    best = max(f1_score(label, w1 >= t) for t in np.unique(w1))
    assert f1_score(label, w1 >= np.float32(threshold)) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(3))
def test_the_threshold_is_the_lowest_of_a_precision(seed: int) -> None:
    w1, label = _rows(seed)
    precision, _, thresholds = precision_recall_curve(label, w1)
    enough = thresholds[precision[:-1] >= 0.8]
    assert choose_threshold(w1, label, 0.8) == pytest.approx(enough.min())


def test_a_precision_out_of_reach_is_told() -> None:
    with pytest.raises(UserError, match=r"no threshold reaches a precision of 0\.9 .* the best is 0\.500"):
        choose_threshold(np.array([0.1, 0.1], np.float32), np.array([0, 1]), 0.9)


def test_quality_is_that_of_scikit_learn() -> None:
    w1, label = _rows(7)
    found = quality(w1, label, 0.6)
    called = w1 >= np.float32(0.6)
    assert found.precision == pytest.approx(precision_score(label, called))
    assert found.recall == pytest.approx(recall_score(label, called))
    assert found.f1 == pytest.approx(f1_score(label, called))
    assert found.accuracy == pytest.approx(np.mean(called == label))
    assert np.isnan(quality(w1, label, 2.0).precision)


def test_a_run_is_calibrated_on_one_half_of_valid_and_measured_on_the_other(trained_run: Path) -> None:
    run = open_run(trained_run)
    found = calibrate(run.model, run.dataset)
    assert found == calibrate(run.model, run.dataset)
    assert 0 < found.threshold < 1
    table = run.dataset.read("valid")
    user, item = (table[name].to_numpy().astype(np.int64) for name in ("user", "item"))
    half = first_half(user, item, run.dataset.items)
    assert 0.4 < half.mean() < 0.6
    w1, _ = soft_labels(logits(run.model, user, item))
    label = table["label"].to_numpy()
    assert found.threshold == choose_threshold(w1[half], label[half])
    assert found.measured_on == quality(w1[~half], label[~half], found.threshold)


def test_the_half_of_a_pair_does_not_depend_on_other_pairs() -> None:
    user, item = np.divmod(np.arange(3000), 60)
    order = np.random.default_rng(0).permutation(3000)[:500]
    np.testing.assert_array_equal(first_half(user, item, 60)[order], first_half(user[order], item[order], 60))


def test_no_validation_rows_to_calibrate_on(trained_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(trained_run)
    read = run.dataset.read
    monkeypatch.setattr(run.dataset, "read", lambda split: read(split).slice(0, 0))
    with pytest.raises(UserError, match=r"too few validation rows to calibrate on .* give a --threshold"):
        calibrate(run.model, run.dataset)
