"""Where to cut soft labels into hard ones: a threshold chosen on labeled rows, and what it is worth."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from invdist.data.dataset import Dataset
from invdist.models.frozen import FrozenModel
from invdist.runtime.errors import UserError
from invdist.serving.annotator import soft_labels
from invdist.serving.scoring import logits


@dataclass(frozen=True, slots=True)
class Quality:
    """What hard labels at a threshold are worth on some labeled rows; NaN where nothing was there to divide by."""

    rows: int
    precision: float
    recall: float
    accuracy: float
    f1: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """A threshold of `w1`, its quality on the training-test rows it was chosen on, and on the validation rows.

    Training has seen the training-test rows, so the second is the one to expect elsewhere.
    """

    threshold: float
    training_test: Quality
    valid: Quality | None

    def as_dict(self) -> dict[str, Any]:
        """Plain data; NaN becomes None."""
        return _without_nan(asdict(self))


def calibrate(model: FrozenModel, dataset: Dataset, precision: float | None = None) -> Calibration:
    """The threshold with the best F1 on training-test rows, or the lowest with at least this precision there."""
    if not dataset.rows.get("training_test"):
        raise UserError(f"{dataset.path}: no training-test rows to calibrate on; give a --threshold instead")
    w1, label = _labeled(model, dataset, "training_test")
    threshold = choose_threshold(w1, label, precision)
    valid = quality(*_labeled(model, dataset, "valid"), threshold) if dataset.rows.get("valid") else None
    return Calibration(threshold, quality(w1, label, threshold), valid)


def choose_threshold(w1: np.ndarray, label: np.ndarray, precision: float | None = None) -> float:
    """Among the values of `w1`: the one with the best F1, or the lowest whose precision is at least `precision`.

    Rows at or above the threshold are called positive. Of equals the lowest is taken.
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
                f"no threshold reaches a precision of {precision:g} on the training-test rows; "
                f"the best is {reached.max():.3f}"
            )
        best = int(enough[-1])
    return float(w1[called[best] - 1])


def quality(w1: np.ndarray, label: np.ndarray, threshold: float) -> Quality:
    """What calling rows with `w1 >= threshold` positive gives."""
    called, label = w1 >= np.float32(threshold), label.astype(bool)
    hits, calls, positives, right = (int(x.sum()) for x in (called & label, called, label, called == label))
    return Quality(
        rows=len(label),
        precision=_ratio(hits, calls),
        recall=_ratio(hits, positives),
        accuracy=_ratio(right, len(label)),
        f1=_ratio(2 * hits, calls + positives),
    )


def _labeled(model: FrozenModel, dataset: Dataset, split: str) -> tuple[np.ndarray, np.ndarray]:
    table = dataset.read(split)
    user, item = (table[name].to_numpy().astype(np.int64) for name in ("user", "item"))
    return soft_labels(logits(model, user, item))[0], table["label"].to_numpy()


def _ratio(part: int, whole: int) -> float:
    return float(part / whole) if whole else float("nan")


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and np.isnan(value) else value
