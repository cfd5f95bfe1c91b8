"""Labeling rules: pure functions from what was observed to 1 (positive), 0 (negative) or -1 (unclear).

Every rule takes float64 columns of one length, NaN where nothing was observed, and gives int8 labels. Where a rule
cannot tell (NaN, a duration of zero or below, a negative play time) the label is unclear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from invdist.data.schema import UNCLEAR_LABEL


def _labels(positive: np.ndarray, negative: np.ndarray) -> np.ndarray:
    labels = np.full(len(positive), UNCLEAR_LABEL, np.int8)
    labels[negative] = 0
    labels[positive] = 1
    return labels


def finish_rate(play_time: np.ndarray, duration: np.ndarray) -> np.ndarray:
    """The played share of each video (float64, above 1 if it was played again), NaN where there is none."""
    known = (play_time >= 0) & (duration > 0)
    with np.errstate(over="ignore"):  # infinity is above every threshold, as it should be
        return np.divide(play_time, duration, out=np.full(len(play_time), np.nan), where=known)


def by_finish_rate(play_time: np.ndarray, duration: np.ndarray, above: float = 0.8, below: float = 0.2) -> np.ndarray:
    """Positive when more than `above` of the video was played, negative below `below`, unclear between."""
    rate = finish_rate(play_time, duration)
    return _labels(rate > above, rate < below)


def by_play_time(play_time: np.ndarray, lower: float, upper: float) -> np.ndarray:
    """Positive from the quartile `upper` on, negative up to the quartile `lower`, unclear between."""
    if not lower < upper:
        return np.full(len(play_time), UNCLEAR_LABEL, np.int8)
    return _labels(play_time >= upper, (play_time >= 0) & (play_time <= lower))


def by_feedback(like: np.ndarray, hate: np.ndarray) -> np.ndarray:
    """Positive when liked, negative when hated, unclear when neither or both."""
    liked, hated = like > 0, hate > 0
    return _labels(liked & ~hated, hated & ~liked)


def by_rating(rating: np.ndarray, positive_from: float, negative_to: float) -> np.ndarray:
    """Positive from `positive_from` on, negative up to `negative_to`, unclear between."""
    return _labels(rating >= positive_from, rating <= negative_to)


def by_label(label: np.ndarray) -> np.ndarray:
    """The log's own label: 1, 0, or NaN for unclear."""
    return _labels(label == 1, label == 0)


def first_clear(labels: Sequence[np.ndarray]) -> np.ndarray:
    """The label of the first rule that is clear about the row."""
    result = labels[0].copy()
    for other in labels[1:]:
        unclear = result == UNCLEAR_LABEL
        result[unclear] = other[unclear]
    return result


COLUMNS: dict[str, tuple[str, ...]] = {
    "finish_rate": ("play_time", "duration"),
    "play_time": ("play_time",),
    "feedback": ("like", "hate"),
    "rating": ("rating",),
    "label": ("label",),
    "long_view": ("long_view",),
}
"""The columns that each rule reads."""


@dataclass(frozen=True, kw_only=True)
class Labeling:
    """A chosen chain of rules with its thresholds: the first rule that is clear decides."""

    rules: tuple[str, ...]
    finish_above: float = 0.8
    finish_below: float = 0.2
    positive_from: float = 3.0
    negative_to: float = 2.0
    quartiles: tuple[float, float] | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the rules read, each once."""
        return tuple(dict.fromkeys(column for rule in self.rules for column in COLUMNS[rule]))

    def label(self, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """Labels (int8) of the rows of `columns`."""
        return first_clear([self._label(rule, columns) for rule in self.rules])

    def _label(self, rule: str, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        if rule == "finish_rate":
            return by_finish_rate(columns["play_time"], columns["duration"], self.finish_above, self.finish_below)
        if rule == "play_time":
            assert self.quartiles is not None, "quartiles are measured before labeling"
            return by_play_time(columns["play_time"], *self.quartiles)
        if rule == "feedback":
            return by_feedback(columns["like"], columns["hate"])
        if rule == "rating":
            return by_rating(columns["rating"], self.positive_from, self.negative_to)
        return by_label(columns[rule])
