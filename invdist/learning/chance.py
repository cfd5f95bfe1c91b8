"""How much of each singular value of the exposure matrix is chance.

If items were shown by popularity alone, user u would see item i with the chance shown(u) * shown(i) / exposures. The
entries of the normalised exposure matrix (`exposure_vectors`) would then have the variance

    a(u) * b(i) / exposures,    a(u) = shown(u) / (shown(u) + 5),    b(i) likewise,

and all of its singular values but the first, which is popularity itself, would lie below an edge. By the theory of
random matrices (the Dyson equation) the edge is the smallest s for which

    G = sum over users of a / (s - a * H) / exposures,    H = sum over items of b / (s - b * G) / exposures

have a solution. Columns near the edge are mostly noise: `without_chance` gives them the weight that brings the matrix
nearest to the one without noise (Gavish and Donoho, "Optimal shrinkage of singular values", 2017).

A model does not read that matrix but rows of length one, and there a column below the edge is worth more than nothing.
Where few columns or none are above it, popularity would take all of the length, and users would be alike that are not.
So `column_weights` shrinks columns against each other only: popularity keeps its share of the length, and what is below
the edge keeps a part of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_BINS = 512
_HALVINGS = 24
_ROUNDS, _CONVERGED = 2000, 1e-9
_KEPT = 0.15
"""What a column keeps of a singular value that is all chance; measured (docs/exposures.md)."""


class Shares(NamedTuple):
    """The values of a (or b) of many ids, as a histogram: equal ones are counted together."""

    value: Tensor
    number: Tensor

    @property
    def total(self) -> float:
        """Ids, counted by their value: one with many exposures as one, one with few as less."""
        return float(self.value @ self.number)


def histogram(value: Tensor) -> Tensor:
    """Values in [0, 1) by bins: their number and their sum, float64 `[2, bins]`. Ranks may add theirs."""
    value = value.double()
    places = (value * _BINS).long()
    found = value.new_zeros((2, _BINS))
    found[0].index_add_(0, places, torch.ones_like(value))
    found[1].index_add_(0, places, value)
    return found


def shares(counted: Tensor) -> Shares:
    """A `histogram` without its empty bins."""
    number, total = counted[:, counted[0] > 0].cpu()
    return Shares(total / number, number)


def edge_of_chance(users: Shares, items: Shares, exposures: float) -> float:
    """The largest singular value but the first that is to be expected by chance."""
    # Values are below 1. If all were 1, the edge would be the sum of both roots: the search starts well above it.
    low, high = 0.0, 2 * ((users.number.sum() / exposures) ** 0.5 + (items.number.sum() / exposures) ** 0.5).item()
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _solvable(middle, users, items, exposures) else (middle, high)
    return high


def _solvable(s: float, users: Shares, items: Shares, exposures: float) -> bool:
    """Whether G and H exist. Repeated from zero they only grow: to the solution, or past what they may be."""
    h = 0.0
    for _ in range(_ROUNDS):
        before = h
        for side in (users, items):
            left = s - side.value * h
            if left.min() <= 0:
                return False
            h = float((side.number * side.value / left).sum() / exposures)
        if h - before < _CONVERGED * h:
            return True
    return False


def without_chance(singular: Tensor, users: Shares, items: Shares, exposures: float) -> Tensor:
    """Singular values, largest first, without the part of chance: zero for those below the edge.

    The first is left as it is: it is popularity, which chance has as well.
    """
    high = edge_of_chance(users, items, exposures)
    few, many = sorted((users.total, items.total))
    ratio = (few / max(many, 1e-12)) ** 0.5
    low = high * (1 - ratio) / (1 + ratio)  # the smallest singular value of such noise
    square = singular.square()
    above = [(square - edge**2).clamp(min=0) for edge in (low, high)]
    found = (above[0] * above[1]).sqrt() / singular.clamp(min=1e-12)
    found[:1] = singular[:1]
    return found


def column_weights(singular: Tensor, users: Shares, items: Shares, exposures: float) -> Tensor:
    """What to scale the columns of singular vectors by, instead of their singular values (largest first).

    `w = sqrt(without_chance² + (_KEPT * singular)²)`, then all but the first made larger by one factor: together they
    are as long as before. If all is chance, these are the singular values.
    """
    rest = singular[1:]
    kept = (without_chance(singular, users, items, exposures)[1:].square() + (_KEPT * rest).square()).sqrt()
    longer = rest.norm() / kept.norm().clamp(min=1e-12)
    return torch.cat([singular[:1], kept * longer])
