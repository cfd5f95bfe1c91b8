"""AUC, NDCG@k and reciprocal rank of the ranking of each user, for all users at once.

Tied scores have no order, so each metric is its mean over every order of the tied rows. That is what
scikit-learn's `roc_auc_score` and `ndcg_score` give, and the reciprocal rank here follows the same rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PerUser:
    """One entry per user with both classes, users in ascending order."""

    user: np.ndarray
    rows: np.ndarray
    auc: np.ndarray
    ndcg: np.ndarray
    reciprocal_rank: np.ndarray
    users_left_out: int
    """Users whose rows all have one label: their ranking cannot be judged."""


def per_user_metrics(user: np.ndarray, label: np.ndarray, level: np.ndarray, k: int) -> PerUser:
    """Ranks each user's rows by score.

    `user`, `label` (0 or 1) and `level` are integer arrays of one length; `level` numbers the distinct scores
    from 0 upwards, equal scores equally. NDCG takes the label as relevance and cuts both rankings at `k`.
    """
    ids, user_index = np.unique(user, return_inverse=True)
    rows = np.bincount(user_index, minlength=len(ids))
    positives = np.bincount(user_index[label == 1], minlength=len(ids))
    judged = (positives > 0) & (positives < rows)
    if not judged.any():
        none = np.empty(0)
        return PerUser(ids[:0], rows[:0], none, none, none, len(ids))

    ties = _Ties.of(user_index, label, level, judged)
    rows, positives = rows[judged], positives[judged]
    return PerUser(
        user=ids[judged],
        rows=rows,
        auc=_auc(ties, rows, positives),
        ndcg=_ndcg(ties, rows, positives, k),
        reciprocal_rank=_reciprocal_rank(ties),
        users_left_out=int(len(ids) - len(rows)),
    )


@dataclass(frozen=True)
class _Ties:
    """Runs of one user's rows with the same score, by user and then from the highest score down."""

    size: np.ndarray
    positives: np.ndarray
    begin: np.ndarray
    """Rows of the same user ranked above the run."""
    first: np.ndarray
    """Index of each user's first run."""
    owner: np.ndarray
    """Which user (as a position in `first`) the run belongs to."""

    @classmethod
    def of(cls, user_index: np.ndarray, label: np.ndarray, level: np.ndarray, judged: np.ndarray) -> _Ties:
        # (user, score, label) packed into one integer: sorting plain integers is several times faster than a
        # lexsort. Users and scores are each numbered below the row count: 63 bits last for two billion rows.
        bits = int(level.max()).bit_length()
        keep = judged[user_index]
        key = user_index[keep].astype(np.int64) << bits
        key |= level.max() - level[keep]
        key <<= 1
        key |= label[keep]
        key.sort()

        run = key >> 1
        start = _starts(run)
        size = np.diff(start, append=len(key))
        positives = np.add.reduceat(key & 1, start)
        first = _starts(run[start] >> bits)
        runs = np.diff(first, append=len(start))
        begin = start - np.repeat(start[first], runs)
        return cls(size, positives, begin, first, np.repeat(np.arange(len(first)), runs))

    def per_user(self, value: np.ndarray) -> np.ndarray:
        return np.add.reduceat(value, self.first)


def _starts(values: np.ndarray) -> np.ndarray:
    change = np.empty(len(values), dtype=bool)
    change[0] = True
    np.not_equal(values[1:], values[:-1], out=change[1:])
    return np.flatnonzero(change)


def _auc(ties: _Ties, rows: np.ndarray, positives: np.ndarray) -> np.ndarray:
    negatives_above = ties.begin - _before_in_user(ties, ties.positives)
    # Doubled, so that half a point for a tie stays an integer and the count is exact.
    lost = ties.per_user(ties.positives * (2 * negatives_above + ties.size - ties.positives))
    return 1.0 - lost / (2.0 * positives * (rows - positives))


def _before_in_user(ties: _Ties, value: np.ndarray) -> np.ndarray:
    before = np.cumsum(value) - value
    return before - before[ties.first][ties.owner]


def _ndcg(ties: _Ties, rows: np.ndarray, positives: np.ndarray, k: int) -> np.ndarray:
    k = min(k, int(rows.max()))
    discounts = np.concatenate([[0.0], np.cumsum(1.0 / np.log2(np.arange(k) + 2.0))])
    through = discounts[np.minimum(ties.begin + ties.size, k)] - discounts[np.minimum(ties.begin, k)]
    gain = ties.per_user(ties.positives / ties.size * through)
    return gain / discounts[np.minimum(positives, k)]


def _reciprocal_rank(ties: _Ties) -> np.ndarray:
    run = np.flatnonzero(ties.positives)
    run = run[_starts(ties.owner[run])]
    above, size, positives = ties.begin[run], ties.size[run], ties.positives[run]
    result = 1.0 / (above + 1.0)
    tied = np.flatnonzero(positives < size)
    if len(tied):
        result[tied] = _mean_reciprocal_of_first(above[tied], size[tied], positives[tied])
    return result


def _mean_reciprocal_of_first(above: np.ndarray, size: np.ndarray, positives: np.ndarray) -> np.ndarray:
    """Mean of 1 / (above + x), x the place of the first of `positives` among `size` rows in random order."""
    places = size - positives + 1
    first = np.cumsum(places) - places
    of = np.repeat(np.arange(len(size)), places)
    x = np.arange(len(of)) - first[of] + 1
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, size.max() + 1)))])

    def log_choose(n: np.ndarray, r: np.ndarray) -> np.ndarray:
        return log_factorial[n] - log_factorial[r] - log_factorial[n - r]

    chance = np.exp(log_choose(size[of] - x, positives[of] - 1) - log_choose(size, positives)[of])
    return np.add.reduceat(chance / (above[of] + x), first)
