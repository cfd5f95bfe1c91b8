"""Logits of every user with every item, computed as matrix products.

`all_pairs(backbone)` gives the form of a backbone. One that is not registered here is called with all pairs of a tile,
which is correct and slow; to make it fast, register a form.

Shapes: embeddings of users `[u, columns]`, of items `[n, columns]`, logits `[u, n]`.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any, Protocol

import torch
from torch import Tensor

from invdist.models.backbone import Backbone
from invdist.models.backbones.gmf import GMF
from invdist.models.backbones.neumf import NeuMF
from invdist.models.exposure_head import ExposureHead
from invdist.models.frozen import Additive

_TILE_VALUES = 1 << 19
"""Numbers in the widest intermediate of a tile: 2 MB, which fits the cache of a core."""


class AllPairs(Protocol):
    """Scores all pairs of some users and items. Both sides are prepared once, then combined."""

    def users(self, rows: Tensor) -> Any:
        """Users, prepared; `logits` takes the result for any range of users at a time."""
        ...

    def items(self, rows: Tensor) -> Any:
        """Items, prepared."""
        ...

    def logits(self, users: Any, items: Any) -> Tensor:
        """Logits `[u, n]` of all pairs."""
        ...


class Product:
    """A logit that is an inner product: one matrix multiply for all pairs.

    GMF: `(u * w) . i + b`, with a bias column of each side `+ ub + ib`. The additions become columns of the product:
    `[u * w, ub + b, 1] . [i, 1, ib]`.
    """

    def __init__(self, weight: Tensor, constant: Tensor, bias: bool) -> None:
        self.weight, self.constant, self.bias = weight, constant, bias

    def users(self, rows: Tensor) -> Tensor:
        """`[u, k + 2]`"""
        k = len(self.weight)
        added = self.constant + (rows[:, k : k + 1] if self.bias else rows.new_zeros(len(rows), 1))
        return torch.cat([rows[:, :k] * self.weight, added, torch.ones_like(added)], 1)

    def items(self, rows: Tensor) -> Tensor:
        """`[k + 2, n]`"""
        k = len(self.weight)
        one = rows.new_ones(len(rows), 1)
        added = rows[:, k : k + 1] if self.bias else torch.zeros_like(one)
        return torch.cat([rows[:, :k], one, added], 1).t().contiguous()

    def logits(self, users: Tensor, items: Tensor) -> Tensor:
        """`[u, n]`"""
        return users @ items


class Tower:
    """NeuMF: the first layer is linear in (user, item), so each side passes it once, not once per pair.

    The rest of the tower runs over tiles of items; the product part and the output's constant are a `Product`.
    """

    def __init__(self, backbone: NeuMF) -> None:
        self.backbone, k = backbone, backbone.dim
        weight = backbone.output.weight[0]
        self.product = Product(weight[:k], backbone.output.bias, backbone.bias)
        self.output = weight[k:]

    def users(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The user's part of the product and of the first layer."""
        return self.product.users(self._product_rows(rows)), self._first(self.backbone.user_part(rows))

    def items(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The item's part of the product and of the first layer."""
        return self.product.items(self._product_rows(rows)), self._first(self.backbone.item_part(rows))

    def logits(self, users: tuple[Tensor, Tensor], items: tuple[Tensor, Tensor]) -> Tensor:
        """`[u, n]`"""
        (user, first_user), (item, first_item) = users, items
        logits = user @ item
        width = max(1, _TILE_VALUES // (len(user) * first_user.shape[1]))
        for start in range(0, len(first_item), width):
            x = (first_user[:, None] + first_item[None, start : start + width]).relu_().flatten(0, 1)
            for layer in self.backbone.tower[1:]:
                x = layer(x).relu_()
            logits[:, start : start + width] += (x @ self.output).view(len(user), -1)
        return logits

    def _first(self, prepared: Tensor) -> Tensor:
        k = self.backbone.dim
        return prepared[:, k : 5 * k].contiguous()

    def _product_rows(self, rows: Tensor) -> Tensor:
        k = self.backbone.dim
        return torch.cat([rows[:, :k], rows[:, 5 * k : 5 * k + 1]], 1) if self.backbone.bias else rows[:, :k]


class Head:
    """A backbone with exposure vectors: the inner backbone's own form, one product, and a hidden layer in tiles.

    All that is linear in an item's columns is one product:
    `[s_u, 1, c_u + w * A x_u, x_u] . [1, s_i, x_i, c_i]`, where `s` is what a side adds by itself. The hidden layer has
    the product `(A x_u) * x_i` among its inputs, so a user has weights of its own for the columns of `x_i`.
    """

    def __init__(self, backbone: ExposureHead) -> None:
        self.backbone, self.inner, d = backbone, all_pairs(backbone.inner), backbone.dim
        self.direct = backbone.direct.weight[0, 2 * d : 3 * d]
        self.mixed = backbone.hidden.weight[:, 2 * d : 3 * d]
        self.output = backbone.output.weight[0]

    def users(self, rows: Tensor) -> tuple[Any, Tensor, Tensor, Tensor]:
        """The inner form's users, the user's side of the product, `A x`, and the user's share of the hidden layer."""
        scalar, c, x, mixed, hidden = self._own_columns(self.backbone.user_part(rows), 3)
        side = torch.cat([scalar, torch.ones_like(scalar), c + mixed * self.direct, x], 1)
        return self.inner.users(self._inner_rows(rows)), side, mixed, hidden

    def items(self, rows: Tensor) -> tuple[Any, Tensor, Tensor, Tensor]:
        """The inner form's items, the item's side of the product, `x`, and the item's share of the hidden layer."""
        scalar, c, x, hidden = self._own_columns(self.backbone.item_part(rows), 2)
        side = torch.cat([torch.ones_like(scalar), scalar, x, c], 1).t().contiguous()
        return self.inner.items(self._inner_rows(rows)), side, x.contiguous(), hidden.contiguous()

    def logits(self, users: tuple[Any, Tensor, Tensor, Tensor], items: tuple[Any, Tensor, Tensor, Tensor]) -> Tensor:
        """`[u, n]`"""
        (inner_users, user, mixed, user_hidden), (inner_items, item, x, item_hidden) = users, items
        logits = user @ item + self.inner.logits(inner_users, inner_items)
        width = max(1, _TILE_VALUES // len(self.output))
        for first in range(0, len(x), width):
            columns = slice(first, first + width)
            some, size = x[columns], max(1, _TILE_VALUES // (len(self.output) * len(x[columns])))
            for start in range(0, len(user), size):
                part = slice(start, start + size)
                weight = (mixed[part, None] * self.mixed).transpose(1, 2)  # [users, d, hidden]
                hidden = torch.matmul(some, weight).add_(user_hidden[part, None]).add_(item_hidden[columns])
                logits[part, columns] += hidden.relu_() @ self.output
        return logits

    def _inner_rows(self, rows: Tensor) -> Tensor:
        return rows[:, : self.backbone.inner.columns]

    def _own_columns(self, part: Tensor, vectors: int) -> tuple[Tensor, ...]:
        """A prepared side without the inner backbone's columns: a scalar, so many vectors, and the hidden layer."""
        d, h = self.backbone.dim, len(self.output)
        return part.split([part.shape[1] - 1 - vectors * d - h, 1, *[d] * vectors, h], 1)[1:]


class Pairwise:
    """Any backbone: called with all pairs of a tile."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone

    def users(self, rows: Tensor) -> Tensor:
        """Unchanged."""
        return rows

    def items(self, rows: Tensor) -> Tensor:
        """Unchanged."""
        return rows

    def logits(self, users: Tensor, items: Tensor) -> Tensor:
        """`[u, n]`"""
        width = max(1, _TILE_VALUES // (2 * len(users) * users.shape[1]))
        tiles = []
        for tile in items.split(width):
            shape = (len(users), len(tile), users.shape[1])
            tiles.append(self.backbone(users[:, None].expand(shape), tile[None].expand(shape)))
        return torch.cat(tiles, 1)


@singledispatch
def all_pairs(backbone: Backbone) -> AllPairs:
    """The form in which a backbone scores all pairs."""
    return Pairwise(backbone)


@all_pairs.register
def _(backbone: GMF) -> AllPairs:
    return Product(backbone.output.weight[0], backbone.output.bias, backbone.bias)


@all_pairs.register
def _(backbone: NeuMF) -> AllPairs:
    return Tower(backbone)


@all_pairs.register
def _(backbone: ExposureHead) -> AllPairs:
    return Head(backbone)


@all_pairs.register
def _(backbone: Additive) -> AllPairs:
    # A product without columns: only the two biases and the constant remain.
    nothing = backbone.overall.new_empty(0)
    return Product(nothing, -backbone.overall, bias=True)
