"""What a backbone is: the dense part of a model, from the table rows of users and items to one logit per pair.

Shapes: rows `[..., n, columns]`, logits `[..., n]`; `k` is the dimension of the paper (32). How to add one:
docs/backbones.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from invdist.embeddings.row_moves import Deltas, UniqueRows

BIAS_COLUMNS = 4  # FBGEMM wants a multiple of 4 columns; the first is the bias, the others stay as drawn.


class Backbone(nn.Module):
    """The dense part of a model: called with the rows of users and of items, it gives logits."""

    columns: int
    """Columns that one row must have."""
    frozen_columns = 0
    """Columns after those that are not trained: see `invdist.models.exposure_head`."""
    separable = False
    """Whether part of the computation concerns the user alone or the item alone. Then
    `combine(user_part(user), item_part(item))` equals `self(user, item)`, and code that scores many pairs of the same
    rows computes each part once."""

    def of_rows(self, rows: Tensor) -> Tensor:
        """Logits of rows `[2n, columns]`, users first. What may be replaced by a faster way to the same numbers."""
        return self(*rows.chunk(2))

    def takes_distinct_rows(self) -> bool:
        """Whether `of_distinct_rows` can be used now, and is faster where rows repeat."""
        return False

    def of_distinct_rows(self, rows: Tensor, pieces: UniqueRows) -> Tensor:
        """`of_rows(rows[pieces.inverse])`, where `rows` has each distinct row once."""
        raise NotImplementedError

    def candidate_logits(
        self, rows: Tensor, deltas: Deltas, dense: Tensor, step: Tensor, candidates: Sequence[float]
    ) -> Tensor | None:
        """Logits `[candidates, n]` at rows + c * deltas and dense + c * step, without dropout; None: try one by one.

        `dense` has all parameters in one vector, in their order, and `step` likewise.
        """
        return None

    def penalty(self, user: Tensor, item: Tensor) -> Tensor | None:
        """What is added to the loss of each labeled pair to keep its rows small: `[n]`; None: nothing."""
        return None

    def user_part(self, rows: Tensor) -> Tensor:
        """The user's own part, prepared: rows of any width."""
        return rows

    def item_part(self, rows: Tensor) -> Tensor:
        """The item's own part, prepared."""
        return rows

    def combine(self, user: Tensor, item: Tensor) -> Tensor:
        """Logits of pairs of prepared rows."""
        return self(user, item)


def autocasts(rows: Tensor) -> bool:
    """Whether operators on these rows are computed in bf16: then by torch, which knows which of them may be."""
    return rows.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(rows.device.type)


def init_linear(layer: nn.Module) -> None:
    """Xavier-uniform weights and zero biases, as in the paper."""
    assert isinstance(layer, nn.Linear)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
