"""Backbones: from the rows of users and items to one logit per pair.

Shapes: rows `[..., n, columns]`, logits `[..., n]`; `k` is the dimension of the paper (32). To add a backbone,
write a module with `columns` and `forward` and register it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

_BIAS_COLUMNS = 4  # FBGEMM wants a multiple of 4 columns; the first is the bias, the others stay as drawn.


class Backbone(nn.Module):
    """The dense part of a model: called with the rows of users and of items, it gives logits."""

    columns: int
    """Columns that one row must have."""


class GMF(Backbone):
    """Generalised matrix factorisation: the elementwise product into one linear output."""

    def __init__(self, dim: int, dropout: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        del dropout  # GMF has no tower to drop from
        self.dim, self.bias = dim, bias
        self.columns = dim + _BIAS_COLUMNS * bias
        self.output = nn.Linear(dim, 1)
        _init_linear(self.output)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        logit = self.output(user[..., : self.dim] * item[..., : self.dim]).squeeze(-1)
        return logit + user[..., self.dim] + item[..., self.dim] if self.bias else logit


class NeuMF(Backbone):
    """GMF joined with a multi-layer tower; both read one row of k + 4k columns."""

    def __init__(self, dim: int, dropout: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        self.dim, self.bias = dim, bias
        self.columns = 5 * dim + _BIAS_COLUMNS * bias
        sizes = [8 * dim, 4 * dim, 2 * dim, dim]
        self.tower = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(2 * dim, 1)
        for layer in (*self.tower, self.output):
            _init_linear(layer)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        k = self.dim
        x = torch.cat([user[..., k : 5 * k], item[..., k : 5 * k]], dim=-1)
        for layer in self.tower:
            x = torch.relu(layer(self.dropout(x)))
        logit = self.output(torch.cat([user[..., :k] * item[..., :k], x], dim=-1)).squeeze(-1)
        return logit + user[..., 5 * k] + item[..., 5 * k] if self.bias else logit


def _init_linear(layer: nn.Module) -> None:
    assert isinstance(layer, nn.Linear)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)


class _Registry:
    def __init__(self) -> None:
        self._types: dict[str, type[Backbone]] = {}

    def register(self, name: str, backbone: type[Backbone]) -> None:
        """Makes `backbone` a choice of `model:`."""
        self._types[name] = backbone

    def names(self) -> list[str]:
        """The choices of `model:`."""
        return sorted(self._types)

    def build(self, name: str, **options: Any) -> Backbone:
        """A backbone by name."""
        return self._types[name](**options)


BACKBONES = _Registry()
BACKBONES.register("gmf", GMF)
BACKBONES.register("neumf", NeuMF)
