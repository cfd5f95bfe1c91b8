"""Exact ranking and calibration metrics of scored interactions, without a loop over users."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from invdist.evaluation.per_user import per_user_metrics
from invdist.runtime.errors import UserError

ECE_BINS = 15
_BITS = 26
_MOST_LOSS = 2.0**25  # of a row: sums stay exact, and a model with such a loss has diverged


def ranking_metrics(user: np.ndarray, label: np.ndarray, score: np.ndarray, k: int = 10) -> dict[str, float | int]:
    """All metrics of rows (`user` integers, `label` 0 or 1, `score` logits; each of shape [rows]).

    Gives `auc` over all rows; `gauc` (mean AUC of a user), `gauc_weighted` (weighted by the user's rows),
    `ndcg` (cut at `k`) and `mrr` (of the first positive) over users with both classes; `logloss`; `ece`
    (expected calibration error, 15 bins of equal width); `rows`, `users`, `users_left_out` (users with one
    class only). Tied scores count as the mean over their orders. Per-user metrics are NaN when every user is
    left out.
    Raises `UserError` for a score that is not finite, a label other than 0 and 1, no rows, or a single class.
    """
    rows = ScoredRows.checked(user, label, score, k)
    totals = Totals.of(rows, k)
    totals.check_both_classes()
    return totals.metrics(auc(rows))


@dataclass(frozen=True)
class ScoredRows:
    """Checked rows: integer `user`, int64 `label`, float64 `score`, and `level`, the index of the score in `scores`."""

    user: np.ndarray
    label: np.ndarray
    score: np.ndarray
    level: np.ndarray
    scores: np.ndarray
    """The distinct scores, ascending."""

    @classmethod
    def checked(cls, user: np.ndarray, label: np.ndarray, score: np.ndarray, k: int) -> Self:
        """Raises `UserError` for input that no metric can be computed from. No rows at all are fine here."""
        user, label, score = np.asarray(user), np.asarray(label), np.asarray(score)
        if not (user.ndim == 1 and user.shape == label.shape == score.shape):
            raise UserError(
                f"user, label and score must be flat and of one length, not {user.shape}, {label.shape}, {score.shape}"
            )
        if k < 1:
            raise UserError(f"NDCG is cut at k = {k}; k must be at least 1")
        if len(user) and user.dtype.kind not in "iu":
            raise UserError(f"user must be integers, not {user.dtype}")
        odd = np.flatnonzero((label != 0) & (label != 1))
        if len(odd):
            raise UserError(f"label of row {odd[0]} is {label[odd[0]]} ({len(odd)} such rows); labels are 0 or 1")
        odd = np.flatnonzero(~np.isfinite(score))
        if len(odd):
            raise UserError(
                f"score of row {odd[0]} is {score[odd[0]]} ({len(odd)} of {len(score)} rows are not finite); "
                "the model that made it has diverged or its input is broken"
            )
        score = score.astype(np.float64)
        order = np.argsort(score)
        ordered = score[order]
        new = np.ones(len(order), dtype=bool)
        np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
        level = np.empty(len(order), dtype=np.int64)
        level[order] = np.cumsum(new) - 1
        return cls(user, label.astype(np.int64), score, level, ordered[new])

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Positive and negative rows at each distinct score."""
        rows = np.bincount(self.level, minlength=len(self.scores))
        positives = np.bincount(self.level[self.label == 1], minlength=len(self.scores))
        return positives, rows - positives


def doubled_wins(positives: np.ndarray, negatives: np.ndarray) -> int:
    """Twice the pairs in which the positive scores higher, a tie as half a pair; counts by ascending score.

    An integer, hence exact; it fits 63 bits up to four billion rows.
    """
    below = np.cumsum(negatives) - negatives
    return int(np.sum(positives * (2 * below + negatives)))


def auc(rows: ScoredRows) -> float:
    """The chance that a positive row scores above a negative one; needs both classes."""
    positives, negatives = rows.counts()
    return doubled_wins(positives, negatives) / (2 * int(positives.sum()) * int(negatives.sum()))


@dataclass(frozen=True)
class Totals:
    """The sums that all metrics but AUC are computed from. Totals of disjoint sets of users can be added.

    A sum of floats depends on their order, hence on who has which user. So each is kept as three integers.
    """

    sums: np.ndarray
    """int64 `[SIZE, 3]`: the numbers of `_NAMES`, then rows, positives and probability sums of each calibration bin.
    Each is `whole + (middle + last * 2^-26) * 2^-26`."""

    _NAMES = (
        *("rows", "positives", "users", "users_left_out", "logloss"),
        *("auc", "judged_rows", "weighted_auc", "ndcg", "reciprocal_rank"),
    )
    SIZE = len(_NAMES) + 3 * ECE_BINS

    @classmethod
    def of(cls, rows: ScoredRows, k: int) -> Self:
        """Totals of these rows, which may be none; every row of a user must be among them."""
        each = per_user_metrics(rows.user, rows.label, rows.level, k)
        logloss = np.logaddexp(0.0, np.where(rows.label == 1, -rows.score, rows.score))
        numbers = (
            *(len(rows.label), rows.label.sum(), len(each.user) + each.users_left_out, each.users_left_out),
            np.minimum(logloss, _MOST_LOSS),
            *(each.auc, each.rows, each.rows * each.auc, each.ndcg, each.reciprocal_rank),
        )
        probability = np.exp(-np.logaddexp(0.0, -rows.score))
        bins = np.minimum((probability * ECE_BINS).astype(np.int64), ECE_BINS - 1)
        sums = [_exact_sums(np.atleast_1d(number)) for number in numbers]
        sums += [
            _exact_sums(np.asarray(weight), bins, ECE_BINS) for weight in (np.ones(len(bins)), rows.label, probability)
        ]
        return cls(np.concatenate(sums))

    @property
    def values(self) -> np.ndarray:
        """The sums, float64, each rounded once."""
        exact = self.sums.astype(object) @ np.array([1 << 2 * _BITS, 1 << _BITS, 1], dtype=object)
        return np.array([total / (1 << 2 * _BITS) for total in exact])

    def __getitem__(self, name: str) -> float:
        return float(self.values[self._NAMES.index(name)])

    def check_both_classes(self) -> None:
        """Raises `UserError` if AUC is not defined."""
        rows, positives = int(self["rows"]), int(self["positives"])
        if not rows:
            raise UserError("there are no rows to evaluate; the split is empty")
        if positives in (0, rows):
            raise UserError(
                f"AUC needs both classes, but all {rows} rows are labeled {int(positives > 0)}; "
                "evaluate on a split with positive and negative rows"
            )

    def metrics(self, auc: float) -> dict[str, float | int]:
        """The metrics of `ranking_metrics`, given the AUC over all rows."""
        judged = self["users"] - self["users_left_out"]
        bin_rows, bin_positives, bin_probability = self.values[len(self._NAMES) :].reshape(3, ECE_BINS)

        def mean(total: str, count: float) -> float:
            return self[total] / count if count else float("nan")

        return {
            "auc": auc,
            "gauc": mean("auc", judged),
            "gauc_weighted": mean("weighted_auc", self["judged_rows"]),
            "ndcg": mean("ndcg", judged),
            "mrr": mean("reciprocal_rank", judged),
            "logloss": self["logloss"] / self["rows"],
            "ece": float(np.abs(bin_positives - bin_probability).sum() / bin_rows.sum()),
            "rows": int(self["rows"]),
            "users": int(self["users"]),
            "users_left_out": int(self["users_left_out"]),
        }


def _exact_sums(values: np.ndarray, bins: np.ndarray | None = None, count: int = 1) -> np.ndarray:
    """Sums of non-negative numbers by bin as integers `[count, 3]` (see `Totals.sums`): the same in any order.

    A value is first rounded to a multiple of 2^-52. Exact for less than 2^27 values in a bin.
    """
    bins = np.zeros(len(values), dtype=np.int64) if bins is None else bins
    whole = np.floor(values)
    middle = np.floor((values - whole) * 2.0**_BITS)
    last = np.rint(((values - whole) * 2.0**_BITS - middle) * 2.0**_BITS)
    return np.stack([np.bincount(bins, part, count).astype(np.int64) for part in (whole, middle, last)], axis=1)
