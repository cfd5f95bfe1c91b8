"""Exposure vectors by numpy, of a matrix that fits in memory."""

from __future__ import annotations

import numpy as np
import torch

from invdist.learning.chance import histogram, shares, without_chance
from invdist.learning.exposure_vectors import Shrinking


def dense_vectors(shown: np.ndarray, dim: int, *, shrink: Shrinking) -> tuple[list[np.ndarray], np.ndarray]:
    """Vectors of users and of items, and all singular values. `shown` has a 1 for each exposure.

    With `shrink`, ids with exposures have five average ones more, and columns weigh what is not chance of them. `step`:
    if that leaves more than half of them. `smooth`: and .15 of their singular values beside it, popularity as much as
    before of the squared length.
    """
    counts = [shown.sum(axis) for axis in (1, 0)]
    scale_user, scale_item = ((count + 5) ** -0.5 for count in counts)
    left, values, right = np.linalg.svd(scale_user[:, None] * shown * scale_item, full_matrices=False)
    if shrink is None:
        return [left[:, :dim] * values[:dim], right[:dim].T * values[:dim]], values
    exposures = float(shown.sum())
    of_users, of_items = (shares(histogram(torch.from_numpy((c := count[count > 0]) / (c + 5)))) for count in counts)
    weights = without_chance(torch.from_numpy(values[:dim]), of_users, of_items, exposures).numpy() / values[:dim]
    if shrink == "step":
        weights = weights if (weights > 0).sum() > dim / 2 else np.ones(dim)
    else:
        square = (weights[1:] ** 2 + 0.15**2) * values[1:dim] ** 2
        weights[1:] = np.sqrt(square * (values[1:dim] ** 2).sum() / square.sum()) / values[1:dim]
    average_user, average_item = (5 * count / exposures for count in counts)
    users = (scale_user[:, None] * (shown + average_item) * scale_item) @ right[:dim].T * weights
    items = (scale_item[:, None] * (shown.T + average_user) * scale_user) @ left[:, :dim] * weights
    return [found * (count > 0)[:, None] for found, count in zip((users, items), counts)], values
