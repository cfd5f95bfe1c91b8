"""Log-loss and the inverse dual loss, per pair, from logits.

Notation of the paper: `l1 = softplus(-s)` is the loss of calling a pair positive, `l0 = softplus(s)` negative.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, softplus


class Annotation(NamedTuple):
    """The soft labels that the inverse dual loss gives a pair: `w1 + w0 = 1`, without gradient."""

    w1: Tensor
    w0: Tensor


def log_loss(logit: Tensor, label: Tensor) -> Tensor:
    """Log-loss of each labeled pair, float32."""
    logit, label = torch.broadcast_tensors(logit.float(), label.float())
    return binary_cross_entropy_with_logits(logit, label, reduction="none")


def annotate(logit: Tensor) -> Annotation:
    """Inverse dual weights of unlabeled pairs, in the precision of `logit` but at least float32.

    `w1 = l0^2 / (l0^2 + l1^2)`: the paper's `(l0/l1) / (l0/l1 + l1/l0)` is the same number, but divides by a loss
    that vanishes. Here the ratio of the smaller loss to the larger lies in [0, 1], so nothing overflows at any logit
    and the smaller weight keeps its digits.
    """
    s = _at_least_float32(logit.detach())
    size = s.abs()
    return _annotation(s, size, softplus(-size))


def inverse_dual_loss(logit: Tensor) -> tuple[Tensor, Annotation]:
    """The inverse dual loss `w1*l1 + w0*l0` of each unlabeled pair, and its annotation; both float64.

    With `l` the smaller of the two losses, the larger is `l + |s|`, and the weights sum to 1: what remains is
    `l + w*|s|` with the weight w of the larger, whose gradient keeps its digits at any logit.

    Near a logit of 0 the gradients of its two parts cancel, and the `sign` rule magnifies what is left, rounding
    included. Double precision of one number per pair costs nothing and keeps the direction right.
    """
    s = logit.double()
    size = s.abs()
    smaller = softplus(-size)
    annotation = _annotation(s.detach(), size.detach(), smaller.detach())
    return torch.addcmul(smaller, torch.minimum(*annotation), size), annotation


def _annotation(s: Tensor, size: Tensor, smaller: Tensor) -> Annotation:
    square = (smaller / (smaller + size)).square()
    unlikely = square / (1 + square)
    likely, positive = 1 - unlikely, s >= 0
    return Annotation(torch.where(positive, likely, unlikely), torch.where(positive, unlikely, likely))


def _at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
