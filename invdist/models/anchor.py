"""What a model that grew keeps of labels that it no longer sees: its rows are held near where they started.

A row theta0 that was learned from n labels is where their loss and the prior balance. A model that grew sees `now` of
them, and u = 1 - now / n is the share that it does not see. Near theta0 the loss of those labels is a quadratic, whose
curvature is their Fisher information; with the share u of the prior that belongs to them, they say

    u / 2 * (prior + information * n) * |theta - theta0|^2

beside the share 1 - u of the prior, which `ExposureHead.penalty` asks for. Without this, rows are free to fit the
sample of labels that they do see, a little more every day.
"""

from __future__ import annotations

import torch
from torch import Tensor

from invdist.embeddings.row_moves import gather_rows
from invdist.models.exposure_head import ExposureHead


class Anchor:
    """Holds local rows near `start`, those that a model grew from: `[local rows, columns]`.

    `counts` are the last columns of its vectors: `labels` and `now` of each local row. A row pays for a whole epoch of
    `steps` steps in those steps that it is expected to be in, so nothing is sent or counted for it.
    """

    def __init__(self, start: Tensor, counts: Tensor, head: ExposureHead, *, batch_size: int, steps: int) -> None:
        self._start = start
        self._prior, self._information = (row.to(start.device) for row in head.curvature())
        labels, now = counts[:, 0], counts[:, 1]
        now = torch.where(now > 0, now, labels)  # 0: all of them
        share = (1 - now / labels.clamp(min=1)).clamp(min=0)
        touching = steps * -torch.expm1(-now / steps)
        self._share = torch.where(labels > 0, share / (batch_size * touching.clamp(min=1e-6)), 0.0)
        self._labels = self._share * labels

    def gradient(self, local_rows: Tensor, rows: Tensor) -> Tensor:
        """What the anchor adds to the mean gradient of `local_rows[rows]` in one step: `[rows, columns]`."""
        strength = torch.outer(self._share[rows], self._prior) + torch.outer(self._labels[rows], self._information)
        return strength * (gather_rows(local_rows, rows) - gather_rows(self._start, rows))
