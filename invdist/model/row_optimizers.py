"""Optimizers of embedding rows: they move touched rows only, and cost nothing for the others.

Each is given a rank's arena, the distinct touched rows and their summed gradient. State has one row per
arena row, so that it is cut, saved and loaded like the rows themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class RowOptimizer(Protocol):
    """What `Rows` needs of an optimizer."""

    state: dict[str, Tensor]
    """Per-row state by name: `[arena rows, ...]`."""
    steps: int
    """Updates so far, over all rows."""

    def update(self, arena: Tensor, rows: Tensor, gradient: Tensor) -> None:
        """Moves `arena[rows]` against `gradient` (`[rows, width]`; rows are distinct)."""
        ...


class _Base:
    def __init__(self, arena: Tensor, *, gamma: float, weight_decay: float, eps: float) -> None:
        self.gamma, self.weight_decay, self.eps = gamma, weight_decay, eps
        self.state: dict[str, Tensor] = {}
        self.steps = 0

    def _decay(self, arena: Tensor, rows: Tensor) -> None:
        if self.weight_decay:
            arena.index_add_(0, rows, arena.index_select(0, rows), alpha=-self.gamma * self.weight_decay)


class Adam(_Base):
    """Lazy Adam: moments of untouched rows rest; the bias correction counts all steps.

    Weight decay is decoupled, and like everything here falls on touched rows only.
    """

    def __init__(
        self, arena: Tensor, *, gamma: float, weight_decay: float, beta1: float, beta2: float, eps: float
    ) -> None:
        super().__init__(arena, gamma=gamma, weight_decay=weight_decay, eps=eps)
        self.betas = (beta1, beta2)
        self.state = {"m": torch.zeros_like(arena), "v": torch.zeros_like(arena)}

    def update(self, arena: Tensor, rows: Tensor, gradient: Tensor) -> None:
        self.steps += 1
        if len(rows) == 0:
            return
        self._decay(arena, rows)
        beta1, beta2 = self.betas
        m = self.state["m"].index_select(0, rows).lerp_(gradient, 1 - beta1)
        v = self.state["v"].index_select(0, rows).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        self.state["m"].index_copy_(0, rows, m)
        self.state["v"].index_copy_(0, rows, v)
        denominator = v.sqrt_().mul_((1 - beta2**self.steps) ** -0.5).add_(self.eps)
        arena.index_add_(0, rows, m.div_(denominator), alpha=-self.gamma / (1 - beta1**self.steps))


class SGD(_Base):
    """Plain gradient descent, without state."""

    def update(self, arena: Tensor, rows: Tensor, gradient: Tensor) -> None:
        self.steps += 1
        self._decay(arena, rows)
        arena.index_add_(0, rows, gradient, alpha=-self.gamma)


class RowwiseAdagrad(_Base):
    """Adagrad with one accumulator per row: the mean square of the row's gradient.

    `square_sum` completes a partial sum of squares over the column shards of the same rows, so that a row
    cut into columns gets the accumulator of the whole row.
    """

    def __init__(
        self,
        arena: Tensor,
        *,
        gamma: float,
        weight_decay: float,
        eps: float,
        columns: int,
        square_sum: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        super().__init__(arena, gamma=gamma, weight_decay=weight_decay, eps=eps)
        self.columns, self._square_sum = columns, square_sum
        self.state = {"sum": torch.zeros(len(arena), dtype=arena.dtype, device=arena.device)}

    def update(self, arena: Tensor, rows: Tensor, gradient: Tensor) -> None:
        self.steps += 1
        squares = self._square_sum(rows, gradient.square().sum(1))
        self._decay(arena, rows)
        total = self.state["sum"].index_add_(0, rows, squares / self.columns).index_select(0, rows)
        arena.index_add_(0, rows, gradient / total.sqrt_().add_(self.eps).unsqueeze(1), alpha=-self.gamma)
