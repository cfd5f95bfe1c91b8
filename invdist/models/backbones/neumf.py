"""`neumf`: GMF joined with a tower of layers."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from invdist.config.registry import BACKBONES
from invdist.models.backbone import BIAS_COLUMNS, Backbone, init_linear


@BACKBONES.register("neumf")
class NeuMF(Backbone):
    """GMF joined with a multi-layer tower; both read one row of k + 4k columns.

    The first layer is linear in the user's and the item's columns, so each has a half of it to itself.
    """

    separable = True

    def __init__(self, dim: int, dropout: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        self.dim, self.bias = dim, bias
        self.columns = 5 * dim + BIAS_COLUMNS * bias
        sizes = [8 * dim, 4 * dim, 2 * dim, dim]
        self.tower = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(2 * dim, 1)
        for layer in (*self.tower, self.output):
            init_linear(layer)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        k = self.dim
        first = self._first(self.dropout(torch.cat([user[..., k : 5 * k], item[..., k : 5 * k]], dim=-1)))
        return self._after(first, user, item)

    @property
    def _first(self) -> nn.Linear:
        layer = self.tower[0]
        assert isinstance(layer, nn.Linear)
        return layer

    def user_part(self, rows: Tensor) -> Tensor:
        return self._half(rows, self._first.weight[:, : 4 * self.dim], self._first.bias)

    def item_part(self, rows: Tensor) -> Tensor:
        return self._half(rows, self._first.weight[:, 4 * self.dim :])

    def combine(self, user: Tensor, item: Tensor) -> Tensor:
        tower = slice(self.dim, 5 * self.dim)
        return self._after(user[..., tower] + item[..., tower], user, item)

    def _half(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Rows with the columns of the tower replaced by their half of the first layer."""
        k = self.dim
        first = linear(self.dropout(rows[..., k : 5 * k]), weight, bias)
        return torch.cat([rows[..., :k], first, rows[..., 5 * k :]], dim=-1)

    def _after(self, first: Tensor, user: Tensor, item: Tensor) -> Tensor:
        """Logits from the output of the first layer before its ReLU, and the columns of the rows outside the tower."""
        k = self.dim
        x = torch.relu(first)
        for layer in self.tower[1:]:
            x = torch.relu(layer(self.dropout(x)))
        logit = self.output(torch.cat([user[..., :k] * item[..., :k], x], dim=-1)).squeeze(-1)
        return logit + user[..., 5 * k] + item[..., 5 * k] if self.bias else logit
