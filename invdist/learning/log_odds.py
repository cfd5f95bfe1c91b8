"""Log-odds of smoothed means, without any learning: the strategy `means`, and the baseline beside every run."""

from __future__ import annotations

import torch
from torch import Tensor

SMOOTHING = 10.0
"""Interactions at the overall mean that are added to each user and each item."""


def overall_mean(rows: Tensor, positives: Tensor) -> Tensor:
    """The share of positives among all labeled interactions, always inside (0, 1).

    One interaction of each class is added: the log-odds of a data set with one class must be finite, too.
    """
    return (positives + 1) / (rows + 2)


def smoothed_log_odds(counts: Tensor, overall: Tensor, smoothing: float = SMOOTHING) -> Tensor:
    """Log-odds of smoothed means: `counts` is `[n, 2]` (interactions, positives), the result float32 `[n]`."""
    rows, positives = counts.unbind(1)
    return torch.logit((positives + smoothing * overall) / (rows + smoothing)).float()
