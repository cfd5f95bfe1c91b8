"""Log-loss and the inverse dual loss, per pair, from logits.

Notation of the paper: `l1 = softplus(-s)` is the loss of calling a pair positive, `l0 = softplus(s)` negative.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

from invdist.embeddings.row_moves import kernels_for


class Annotation(NamedTuple):
    """The soft labels that the inverse dual loss gives a pair: `w1 + w0 = 1`, without gradient."""

    w1: Tensor
    w0: Tensor


def log_loss(logit: Tensor, label: Tensor) -> Tensor:
    """Log-loss of each labeled pair, float32."""
    if kernels_for(logit) and kernels_for(label) and logit.dim() == 1 and logit.shape == label.shape:
        return _LogLoss.apply(logit, label)
    logit, label = torch.broadcast_tensors(logit.float(), label.float())
    return binary_cross_entropy_with_logits(logit, label, reduction="none")


class _LogLoss(torch.autograd.Function):
    """The log-loss and its slope, sigmoid(s) - label, as one kernel. Labels have no gradient."""

    @staticmethod
    def forward(ctx: Any, logit: Tensor, label: Tensor) -> Tensor:
        compiled = kernels_for(logit)
        assert compiled is not None
        loss, slope = compiled.log_loss(logit.contiguous(), label.contiguous()).unbind()
        ctx.save_for_backward(slope)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.saved_tensors[0] * gradients[0], None


def log_loss_sums(logits: Tensor, label: Tensor) -> Tensor:
    """The log-loss of `[candidates, n]` logits summed over pairs: float64 `[candidates]`."""
    compiled = kernels_for(logits)
    if compiled is None or label.dtype != torch.float32:
        return log_loss(logits, label).sum(1, dtype=torch.float64)
    return torch.tensor(compiled.log_loss_sums(logits.contiguous(), label.contiguous()), dtype=torch.float64)


def annotate(logit: Tensor) -> Annotation:
    """Inverse dual weights of unlabeled pairs, in the precision of `logit` but at least float32.

    `w1 = l0^2 / (l0^2 + l1^2)`: the paper's `(l0/l1) / (l0/l1 + l1/l0)` is the same number, but divides by a loss
    that vanishes. Here the ratio of the smaller loss to the larger lies in [0, 1], so nothing overflows at any logit
    and the smaller weight keeps its digits.
    """
    s = _at_least_float32(logit.detach())
    size = s.abs()
    return Annotation(*_weights(s, size, softplus(-size))[:2])


def inverse_dual_loss(logit: Tensor) -> tuple[Tensor, Annotation]:
    """The inverse dual loss `w1*l1 + w0*l0` of each unlabeled pair, and its annotation; both float64.

    With `l` the smaller of the two losses, the larger is `l + |s|`, and the weights sum to 1: what remains is
    `l + w*|s|` with the weight w of the larger, whose gradient keeps its digits at any logit.

    Near a logit of 0 the gradients of its two parts cancel, and the `sign` rule magnifies what is left, rounding
    included. Double precision of one number per pair costs nothing and keeps the direction right.
    """
    loss, w1, w0 = _DualLoss.apply(logit)
    return loss, Annotation(w1, w0)


class _DualLoss(torch.autograd.Function):
    """With s the logit, e = exp(-|s|), l = log(1 + e) and w the weight of the larger loss, which has no gradient:

    loss = l + w |s|,   d loss / ds = sign(s) (w - e / (1 + e)).
    """

    @staticmethod
    def forward(ctx: Any, logit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.dtype = logit.dtype
        if (compiled := kernels_for(logit)) is not None:
            loss, w1, w0, slope = compiled.dual_loss(logit.contiguous()).unbind()
            ctx.save_for_backward(slope)
            ctx.mark_non_differentiable(w1, w0)
            return loss, w1, w0
        s = logit.double()
        size = s.abs()
        e = size.neg().exp_()
        smaller = e.log1p()
        w1, w0, w = _weights(s, size, smaller)
        ctx.save_for_backward(e.div_(e + 1).neg_().add_(w).mul_(s.sign()))
        ctx.mark_non_differentiable(w1, w0)
        return smaller.addcmul_(w, size), w1, w0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (ctx.saved_tensors[0] * gradients[0]).to(ctx.dtype)


def _weights(s: Tensor, size: Tensor, smaller: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """w1, w0, and the smaller of them."""
    square = (smaller / (smaller + size)).square_()
    unlikely = square.div_(square + 1)
    likely, positive = 1 - unlikely, s >= 0
    return torch.where(positive, likely, unlikely), torch.where(positive, unlikely, likely), unlikely


def _at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
