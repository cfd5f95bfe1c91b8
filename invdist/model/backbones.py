"""Backbones: from the rows of users and items to one logit per pair.

Shapes: rows `[..., n, columns]`, logits `[..., n]`; `k` is the dimension of the paper (32). To add a backbone,
write a module with `columns` and `forward` and register it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_BIAS_COLUMNS = 4  # FBGEMM wants a multiple of 4 columns; the first is the bias, the others stay as drawn.


class Backbone(nn.Module):
    """The dense part of a model: called with the rows of users and of items, it gives logits."""

    columns: int
    """Columns that one row must have."""
    halves = False
    """Whether part of a logit is of the user alone or of the item alone. Then `join(of_user(user), of_item(item))` is
    `self(user, item)`, and who scores many pairs of the same rows prepares each row once."""

    def of_user(self, rows: Tensor) -> Tensor:
        """The user's own part, prepared: rows of any width."""
        return rows

    def of_item(self, rows: Tensor) -> Tensor:
        """The item's own part, prepared."""
        return rows

    def join(self, user: Tensor, item: Tensor) -> Tensor:
        """Logits of pairs of prepared rows."""
        return self(user, item)


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
    """GMF joined with a multi-layer tower; both read one row of k + 4k columns.

    The first layer is linear in the user's and the item's columns, so each has a half of it to itself.
    """

    halves = True

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
        first = self._first(self.dropout(torch.cat([user[..., k : 5 * k], item[..., k : 5 * k]], dim=-1)))
        return self._after(first, user, item)

    @property
    def _first(self) -> nn.Linear:
        layer = self.tower[0]
        assert isinstance(layer, nn.Linear)
        return layer

    def of_user(self, rows: Tensor) -> Tensor:
        return self._half(rows, self._first.weight[:, : 4 * self.dim], self._first.bias)

    def of_item(self, rows: Tensor) -> Tensor:
        return self._half(rows, self._first.weight[:, 4 * self.dim :])

    def join(self, user: Tensor, item: Tensor) -> Tensor:
        tower = slice(self.dim, 5 * self.dim)
        return self._after(user[..., tower] + item[..., tower], user, item)

    def _half(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Rows whose columns of the tower have gone through their half of the first layer."""
        k = self.dim
        first = linear(self.dropout(rows[..., k : 5 * k]), weight, bias)
        return torch.cat([rows[..., :k], first, rows[..., 5 * k :]], dim=-1)

    def _after(self, first: Tensor, user: Tensor, item: Tensor) -> Tensor:
        """Logits from the outcome of the first layer, before its ReLU; of the rows, the columns beside the tower's."""
        k = self.dim
        x = torch.relu(first)
        for layer in self.tower[1:]:
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
