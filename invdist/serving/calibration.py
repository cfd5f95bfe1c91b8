"""Chooses the threshold that turns soft labels into hard ones on validation rows, and measures it on others."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from invdist.data import hashing
from invdist.data.dataset import Dataset
from invdist.models.frozen import FrozenModel
from invdist.runtime.errors import UserError
from invdist.serving.annotation import soft_labels
from invdist.serving.scoring import logits
from invdist.training.events import jsonable


@dataclass(frozen=True, slots=True)
class Quality:
    """How good hard labels at a threshold are on some labeled rows; NaN where there is nothing to divide by."""

    rows: int
    precision: float
    recall: float
    accuracy: float
    f1: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """A threshold of `w1`, chosen on one half of the validation rows and measured on the other."""

    threshold: float
    chosen_on: Quality
    measured_on: Quality
    """What to expect of other rows."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data; NaN becomes None."""
        return jsonable(asdict(self))


def calibrate(model: FrozenModel, dataset: Dataset, precision: float | None = None) -> Calibration:
    """The threshold with the best F1, or the lowest with at least this precision, on half of the validation rows.

    The training-test rows would not do: the model has learned from them. The half of a row is a hash of its pair, so
    it is the same in every run on a data set.
    """
    table = dataset.read("valid")
    user, item = (table[name].to_numpy().astype(np.int64) for name in ("user", "item"))
    label = table["label"].to_numpy()
    chosen = first_half(user, item, dataset.items)
    if not label[chosen].any() or chosen.all():
        raise UserError(
            f"{dataset.path}: too few validation rows to calibrate on ({int(label[chosen].sum())} positives in the "
            f"half that the threshold is chosen on, {len(label)} rows in all); give a --threshold instead"
        )
    w1, _ = soft_labels(logits(model, user, item))
    threshold = choose_threshold(w1[chosen], label[chosen], precision)
    return Calibration(
        threshold,
        chosen_on=quality(w1[chosen], label[chosen], threshold),
        measured_on=quality(w1[~chosen], label[~chosen], threshold),
    )


def first_half(user: np.ndarray, item: np.ndarray, items: int) -> np.ndarray:
    """Which pairs are of the half that a threshold is chosen on (bool)."""
    words = hashing.mix(hashing.key("calibration"), user * items + item)
    return hashing.uniform(words) < 0.5


def choose_threshold(w1: np.ndarray, label: np.ndarray, precision: float | None = None) -> float:
    """Among the values of `w1`: the one with the best F1, or the lowest whose precision is at least `precision`.

    Rows at or above the threshold count as positive. Of equally good thresholds the lowest is taken.
    """
    order = np.argsort(-w1, kind="stable")
    w1, label = w1[order], label[order].astype(np.int64)
    # A threshold takes all rows of equal w1 or none: only the last of each run of equals is a choice.
    last = np.append(w1[1:] != w1[:-1], True)
    called, found = np.flatnonzero(last) + 1, np.cumsum(label)[last]
    reached = found / called
    if precision is None:
        f1 = 2 * found / (called + max(int(label.sum()), 1))
        best = len(f1) - 1 - int(np.argmax(f1[::-1]))
    else:
        enough = np.flatnonzero(reached >= precision)
        if not len(enough):
            raise UserError(
                f"no threshold reaches a precision of {precision:g} on the validation rows it is chosen on; "
                f"the best is {reached.max():.3f}"
            )
        best = int(enough[-1])
    return float(w1[called[best] - 1])


def quality(w1: np.ndarray, label: np.ndarray, threshold: float) -> Quality:
    """The quality of calling rows with `w1 >= threshold` positive."""
    called, label = w1 >= np.float32(threshold), label.astype(bool)
    hits, calls, positives, right = (int(x.sum()) for x in (called & label, called, label, called == label))
    return Quality(
        rows=len(label),
        precision=_ratio(hits, calls),
        recall=_ratio(hits, positives),
        accuracy=_ratio(right, len(label)),
        f1=_ratio(2 * hits, calls + positives),
    )


def _ratio(part: int, whole: int) -> float:
    return float(part / whole) if whole else float("nan")
