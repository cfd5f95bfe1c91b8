"""Rows that are held by labels that are no longer seen, against the closed form of a logistic regression."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from invdist.models.anchor import Anchor
from invdist.models.backbones.gmf import GMF
from invdist.models.exposure_head import ExposureHead

_DIM, _BATCH, _STEPS = 8, 64, 50


def _head() -> ExposureHead:
    return ExposureHead(GMF(dim=4), _DIM, prior=3.0)


def _anchor(counts: list[list[float]], start: Tensor) -> Anchor:
    return Anchor(start, torch.tensor(counts), _head(), batch_size=_BATCH, steps=_STEPS)


def test_what_is_not_seen_holds_in_proportion() -> None:
    head = _head()
    start = torch.randn(4, head.columns)
    # All labels seen, a quarter of few, a quarter of many, and a new id without any.
    anchor = _anchor([[40, 0], [40, 10], [4000, 1000], [0, 0]], start)
    moved, rows = start + 1, torch.arange(4)
    found = anchor.gradient(moved, rows)
    assert not found[[0, 3]].any()
    bias = head.inner.columns
    # Over an epoch of the steps that it is expected in, a row pays for all that is not seen.
    for row, labels, now in ((1, 40, 10), (2, 4000, 1000)):
        steps = _STEPS * (1 - (1 - 1 / _STEPS) ** now)
        paid = found[row] * _BATCH * steps
        expected = 0.75 * (3 + 0.22 * labels)
        torch.testing.assert_close(paid[bias], torch.tensor(expected), rtol=0.02, atol=0)
        torch.testing.assert_close(paid[-1], torch.tensor(0.75 * (3 + 0.22 * labels / _DIM)), rtol=0.02, atol=0)
        torch.testing.assert_close(paid[0], torch.tensor(0.75 * 12**0.5), rtol=0.02, atol=0)
    assert not anchor.gradient(start, rows).any()
    torch.testing.assert_close(anchor.gradient(moved, rows[1:3]), found[1:3])


def test_a_bias_ends_where_all_labels_would_have_put_it() -> None:
    """The bias of one row, learned from old labels, then from new ones and a quarter of the old."""
    prior, now_old, old, new = 3.0, 100, 400, 100
    positive_old, positive_new = 0.3, 0.5

    def optimum(parts: Sequence[tuple[float, float]], share: float, held: tuple[float, float]) -> float:
        """By Newton, of the loss of parts (labels, share of positives), a share of the prior and an anchor."""
        theta, (strength, at) = 0.0, held
        for _ in range(50):
            p = 1 / (1 + 2.718281828459045**-theta)
            slope = sum(n * (p - q) for n, q in parts) + share * prior * theta + strength * (theta - at)
            theta -= slope / (sum(n * p * (1 - p) for n, _ in parts) + share * prior + strength)
        return theta

    before = optimum([(old, positive_old)], 1, (0, 0))
    anew = optimum([(old, positive_old), (new, positive_new)], 1, (0, 0))
    labels, now = old + new, now_old + new
    anchor = _anchor([[labels, now]], torch.full((1, _head().columns), before))
    pull = anchor.gradient(torch.full((1, _head().columns), before + 1), torch.zeros(1, dtype=torch.int64))
    steps = _STEPS * (1 - (1 - 1 / _STEPS) ** now)
    strength = float(pull[0, _head().inner.columns]) * _BATCH * steps
    seen = [(now_old, positive_old), (new, positive_new)]
    free, held = (optimum(seen, now / labels, (s, before)) for s in (0.0, strength))
    assert abs(held - anew) < 0.25 * abs(free - anew)
