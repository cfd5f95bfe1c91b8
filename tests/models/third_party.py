"""A backbone of somebody else, in one file: a layer for users, a layer for items, and their inner product."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from invdist.config.registry import BACKBONES
from invdist.models.backbone import BIAS_COLUMNS, Backbone, init_linear


@BACKBONES.register("two_tower")
class TwoTower(Backbone):
    """Users and items pass one layer each; the logit is the inner product of the results."""

    separable = True

    def __init__(self, dim: int, dropout: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        self.dim, self.bias = dim, bias
        self.columns = dim + BIAS_COLUMNS * bias
        self.user, self.item = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)
        for layer in (self.user, self.item):
            init_linear(layer)

    def user_part(self, rows: Tensor) -> Tensor:
        return self._side(self.user, rows)

    def item_part(self, rows: Tensor) -> Tensor:
        return self._side(self.item, rows)

    def combine(self, user: Tensor, item: Tensor) -> Tensor:
        k = self.dim
        logit = (user[..., :k] * item[..., :k]).sum(-1)
        return logit + user[..., k] + item[..., k] if self.bias else logit

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.combine(self.user_part(user), self.item_part(item))

    def _side(self, layer: nn.Linear, rows: Tensor) -> Tensor:
        hidden = torch.tanh(layer(self.dropout(rows[..., : self.dim])))
        return torch.cat([hidden, rows[..., self.dim :]], -1)
