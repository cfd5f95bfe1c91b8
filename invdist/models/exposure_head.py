"""Any backbone with exposure vectors beside its own columns.

A row is `[columns of the backbone | bias, 3 unused | c | x | log(1 + exposures), labeled, 2 unused]`. All up to the
column `c` is trained; the exposure vector `x` of unit length and the counts are frozen. With `user` and `item` sides,

    logit = backbone(user, item) + bias_u + bias_i          as without vectors
          + c_u . x_i + x_u . c_i                           what this user thinks of such items, who likes this item
          + w . f + hidden(f),   f = [x_u, x_i, (A x_u) * x_i, log counts]

so a user without labels is scored by what similar users liked, and a new one moves away from that with every label.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from invdist.models.backbone import BIAS_COLUMNS, Backbone

COUNT_COLUMNS = 4
"""Frozen columns after a vector: the log of the exposures, the number of labels, and padding for FBGEMM."""
_LOG_COUNT_OFFSET = 4.0  # brings log counts of a few dozen exposures near zero


class ExposureHead(Backbone):
    """`inner` and a head over exposure vectors of `dim` columns."""

    separable = True

    def __init__(
        self, inner: Backbone, dim: int, *, hidden: int = 128, dropout: float = 0.3, prior: float = 3.0
    ) -> None:
        super().__init__()
        self.inner, self.dim, self.prior = inner, dim, prior
        self.columns = inner.columns + BIAS_COLUMNS + dim
        self.frozen_columns = dim + COUNT_COLUMNS
        self.mix = nn.Linear(dim, dim, bias=False)
        self.direct = nn.Linear(3 * dim + 2, 1)
        self.hidden = nn.Linear(3 * dim + 2, hidden)
        self.output = nn.Linear(hidden, 1, bias=False)
        self.dropout = nn.Dropout(dropout)

    def head_parameters(self) -> list[nn.Parameter]:
        """The dense weights that are not the inner backbone's."""
        return [p for module in (self.mix, self.direct, self.hidden, self.output) for p in module.parameters()]

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        u, i = self._split(user), self._split(item)
        product = self.mix(u.x) * i.x
        f = torch.cat([u.x, i.x, product, u.log_count, i.log_count], -1)
        hidden = torch.relu(self.hidden(self.dropout(f)))
        logit = (self.direct(f) + self.output(self.dropout(hidden))).squeeze(-1)
        return self.inner(u.inner, i.inner) + logit + u.bias + i.bias + (u.c * i.x).sum(-1) + (u.x * i.c).sum(-1)

    def penalty(self, user: Tensor, item: Tensor) -> Tensor:
        """What a labeled pair pays for the size of its trained columns: `[n]`.

        Each row has a Gaussian prior, and pays its share at each of its labels. The precision is `prior` for the head's
        own columns, which give a logit the variance 1 / prior. The k columns of the backbone are multiplied with those
        of the other side: with precision sqrt(k * prior) their products have the same variance.
        """
        own, total = self.inner.columns, 0.0
        for rows in (user, item):
            labels = rows[..., self.columns + self.dim + 1].clamp(min=1)
            inner, head = (part.square().sum(-1) for part in rows[..., : self.columns].tensor_split([own], -1))
            total = total + ((own * self.prior) ** 0.5 * inner + self.prior * head) / labels
        return 0.5 * total

    # `user_part` and `item_part` compute once per row what `combine` would compute again for every pair:
    #   user    [inner | bias + its share of `direct` | c | x | A x | its share of `hidden`]
    #   item    [inner | bias + its share of `direct` | c | x | its share of `hidden`]

    def user_part(self, rows: Tensor) -> Tensor:
        side, d = self._split(rows), self.dim
        inner = self.inner.user_part(side.inner) if self.inner.separable else side.inner
        scalar = side.bias + side.x @ self.direct.weight[0, :d] + side.log_count[..., 0] * self.direct.weight[0, -2]
        hidden = linear(side.x, self.hidden.weight[:, :d], self.hidden.bias)
        hidden = hidden + side.log_count * self.hidden.weight[:, -2]
        scalar = (scalar + self.direct.bias).unsqueeze(-1)
        return torch.cat([inner, scalar, side.c, side.x, self.mix(side.x), hidden], -1)

    def item_part(self, rows: Tensor) -> Tensor:
        side, d = self._split(rows), self.dim
        inner = self.inner.item_part(side.inner) if self.inner.separable else side.inner
        scalar = side.bias + side.x @ self.direct.weight[0, d : 2 * d]
        scalar = scalar + side.log_count[..., 0] * self.direct.weight[0, -1]
        hidden = linear(side.x, self.hidden.weight[:, d : 2 * d]) + side.log_count * self.hidden.weight[:, -1]
        return torch.cat([inner, scalar.unsqueeze(-1), side.c, side.x, hidden], -1)

    def combine(self, user: Tensor, item: Tensor) -> Tensor:
        d, h = self.dim, self.hidden.out_features
        user_inner, user_scalar, user_c, user_x, mixed, user_hidden = user.split(
            [user.shape[-1] - 1 - 3 * d - h, 1, d, d, d, h], -1
        )
        item_inner, item_scalar, item_c, item_x, item_hidden = item.split(
            [item.shape[-1] - 1 - 2 * d - h, 1, d, d, h], -1
        )
        product = mixed * item_x
        hidden = torch.relu(user_hidden + item_hidden + linear(product, self.hidden.weight[:, 2 * d : 3 * d]))
        logit = self.output(hidden) + user_scalar + item_scalar
        logit = logit.squeeze(-1) + product @ self.direct.weight[0, 2 * d : 3 * d]
        logit = logit + (user_c * item_x).sum(-1) + (user_x * item_c).sum(-1)
        score = self.inner.combine if self.inner.separable else self.inner
        return logit + score(user_inner, item_inner)

    def _split(self, rows: Tensor) -> _Side:
        first, bias, c, x, counts = rows.split(
            [self.inner.columns, BIAS_COLUMNS, self.dim, self.dim, COUNT_COLUMNS], -1
        )
        return _Side(first, bias[..., 0], c, x, counts[..., :1] - _LOG_COUNT_OFFSET)


class _Side(NamedTuple):
    """The columns of one side of a pair."""

    inner: Tensor
    bias: Tensor
    c: Tensor
    x: Tensor
    log_count: Tensor
