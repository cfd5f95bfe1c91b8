"""Dropout: how many values are dropped, independently of each other, what remains, and its gradient."""

from __future__ import annotations

import pytest
import torch

from invdist.models.dropout import Dropout

N = 400_001  # not a multiple of 4


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9])
def test_a_share_p_is_dropped_and_the_mean_kept(p: float) -> None:
    torch.manual_seed(1)
    x = torch.ones(N, requires_grad=True)
    found = Dropout(p)(x)
    kept = found != 0
    five_sigma = 5 * (p * (1 - p) / N) ** 0.5
    assert float(kept.double().mean()) == pytest.approx(1 - p, abs=five_sigma)
    torch.testing.assert_close(found[kept], torch.full_like(found[kept], 1 / (1 - p)), rtol=1e-3, atol=0)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert torch.equal(gradient, found.detach())


def test_neighbours_are_dropped_independently() -> None:
    """Four neighbours come from one random number: every pattern of the four is as frequent as for a fair draw."""
    torch.manual_seed(2)
    kept = (Dropout(0.3)(torch.ones(4 * 100_000)) != 0).view(-1, 4)
    pattern = (kept.long() * torch.tensor([1, 2, 4, 8])).sum(1)
    found = torch.bincount(pattern, minlength=16).double()
    ones = torch.tensor([bin(i).count("1") for i in range(16)], dtype=torch.float64)
    expected = 100_000 * 0.7**ones * 0.3 ** (4 - ones)
    chi_square = float(((found - expected) ** 2 / expected).sum())
    assert chi_square < 44.3  # 15 degrees of freedom: exceeded once in 10,000 draws


def test_it_follows_the_seed_and_does_nothing_in_evaluation() -> None:
    layer, x = Dropout(0.4), torch.randn(31, 7)
    torch.manual_seed(3)
    first, second = layer(x), layer(x)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first)
    assert not torch.equal(first, second)
    assert layer.eval()(x) is x
    assert Dropout(0.0)(x) is x
