"""Losses against the literal definitions of the paper in float64, at logits from 0 to 1e4."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from invdist.learning.losses import annotate, inverse_dual_loss, log_loss

_SIZES = [0.0, 1e-30, 1e-8, 1e-3, 0.1, 0.5, 1.0, 3.0, 10.0, 30.0, 88.0, 100.0, 700.0, 1e3, 1e4]
LOGITS = [sign * size for size in _SIZES for sign in (1, -1)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
MODERATE = [s for s in LOGITS if abs(s) <= 30]  # where the literal definition divides by no vanishing loss


def literal(s: Tensor) -> tuple[Tensor, Tensor]:
    """The paper's words: weights from the ratios of the losses, without gradient, times the losses."""
    l1, l0 = -logsigmoid(s), -logsigmoid(-s)
    with torch.no_grad():
        z = l0 / l1 + l1 / l0
        w1, w0 = (l0 / l1) / z, (l1 / l0) / z
    return w1 * l1 + w0 * l0, w1


@pytest.mark.parametrize("dtype", DTYPES)
def test_dual_loss_and_its_gradient_are_the_papers(dtype: torch.dtype) -> None:
    given = torch.tensor(MODERATE, dtype=dtype, requires_grad=True)
    loss, annotation = inverse_dual_loss(given)
    s = given.detach().double().requires_grad_()
    expected, w1 = literal(s)
    np.testing.assert_allclose(loss.detach().double(), expected.detach(), rtol=1e-6)
    np.testing.assert_allclose(annotation.w1.double(), w1, rtol=1e-6, atol=1e-30)
    (gradient,) = torch.autograd.grad(loss.sum(), given)
    (wanted,) = torch.autograd.grad(expected.sum(), s)
    rounding = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    np.testing.assert_allclose(gradient.double(), wanted, rtol=rounding, atol=1e-16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dual_loss_at_extreme_logits(dtype: torch.dtype) -> None:
    given = torch.tensor(LOGITS, dtype=dtype, requires_grad=True)
    loss, (w1, w0) = inverse_dual_loss(given)
    (gradient,) = torch.autograd.grad(loss.sum(), given)
    for values in (loss.detach(), w1, w0, gradient):
        assert torch.isfinite(values).all()
    assert ((w1 >= 0) & (w0 >= 0)).all()
    np.testing.assert_allclose((w1 + w0).double(), 1.0, atol=1e-7)
    for index, s in enumerate(given.detach().double().tolist()):
        # Beyond 30 the gradient is that of the smaller loss alone: the other's weight is below 1e-28.
        if abs(s) > 30:
            assert gradient[index].item() == pytest.approx(-math.copysign(math.exp(-abs(s)), s), rel=1e-2, abs=1e-38)
            assert (w1[index].item(), w0[index].item()) == pytest.approx((float(s > 0), float(s < 0)), abs=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_annotation_of_its_own_is_that_of_the_loss(dtype: torch.dtype) -> None:
    given = torch.tensor(LOGITS, dtype=dtype)
    for alone, beside in zip(annotate(given), inverse_dual_loss(given)[1], strict=True):
        assert alone.dtype in (torch.float32, torch.float64)
        assert torch.isfinite(alone).all()
        np.testing.assert_allclose(alone.double(), beside.double(), rtol=2e-6, atol=1e-37)


def test_annotation_is_symmetric_and_grows_with_the_logit() -> None:
    s = torch.linspace(-20, 20, 401, dtype=torch.float64)
    w1, w0 = annotate(s)
    assert torch.equal(w1, w0.flip(0)) or torch.allclose(w1, w0.flip(0), rtol=1e-12)
    assert (w1.diff() >= 0).all()
    assert annotate(torch.zeros(1)).w1.item() == 0.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_loss_at_extreme_logits(dtype: torch.dtype) -> None:
    for label in (0.0, 1.0):
        s = torch.tensor(LOGITS, dtype=dtype, requires_grad=True)
        loss = log_loss(s, torch.full((len(LOGITS),), label))
        (gradient,) = torch.autograd.grad(loss.sum(), s)
        assert torch.isfinite(loss).all()
        assert torch.isfinite(gradient).all()
        x = s.detach().double().numpy()
        np.testing.assert_allclose(loss.detach(), np.logaddexp(0, -x if label else x), rtol=1e-6, atol=1e-6)
        with np.errstate(over="ignore"):
            expected = 1 / (1 + np.exp(-x)) - label
        np.testing.assert_allclose(gradient.double(), expected, rtol=1e-2, atol=1e-7)
