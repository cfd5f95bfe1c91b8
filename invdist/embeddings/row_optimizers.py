"""Optimizers of embedding rows. They move touched rows only; the others cost nothing.

Each gets the local rows of a rank, the distinct touched rows and their summed gradient. State has one row per local
row, so that it is sharded, saved and loaded like the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim.adamw import adamw

from invdist.embeddings.row_moves import gather_rows, kernels_for, store_rows, zeros_beside

_BLOCK_ROWS, _BLOCK_VALUES = 1024, 65536  # a block has at least so many rows, and more if they are narrow


class ColumnGroup(NamedTuple):
    """The first `columns` columns of a row, or those after the group before, with a step size of their own."""

    columns: int
    gamma: float
    eps: float


class RowOptimizer(Protocol):
    """What `EmbeddingStore` needs of an optimizer."""

    state: dict[str, Tensor]
    """State by name: `[local rows, ...]`."""
    steps: int
    """Updates so far, over all rows."""
    pace: float
    """What learning rates are multiplied by."""

    def update(self, local_rows: Tensor, rows: Tensor, gradient: Tensor) -> None:
        """Moves `local_rows[rows]` against `gradient` (`[rows, width]`; rows are distinct)."""
        ...


class _Base:
    def __init__(self, local_rows: Tensor, *, gamma: float, weight_decay: float, eps: float) -> None:
        self.gamma, self.weight_decay, self.eps = gamma, weight_decay, eps
        self.state: dict[str, Tensor] = {}
        self.steps, self.pace = 0, 1.0

    def _descend(self, local_rows: Tensor, rows: Tensor, direction: Tensor) -> None:
        """Weight decay, then `gamma` along `-direction`, on the touched rows."""
        gamma = self.gamma * self.pace
        values = gather_rows(local_rows, rows).mul_(1 - gamma * self.weight_decay)
        store_rows(local_rows, rows, values.sub_(direction, alpha=gamma))


class Adam(_Base):
    """Lazy Adam: the moments of untouched rows do not decay; the bias correction counts all steps.

    Weight decay is decoupled, and applies to touched rows only.
    """

    def __init__(
        self,
        local_rows: Tensor,
        *,
        gamma: float,
        weight_decay: float,
        beta1: float,
        beta2: float,
        eps: float,
        groups: Sequence[ColumnGroup] = (),
    ) -> None:
        super().__init__(local_rows, gamma=gamma, weight_decay=weight_decay, eps=eps)
        self.betas, self.groups = (beta1, beta2), groups
        self.state = {"m": zeros_beside(local_rows), "v": zeros_beside(local_rows)}

    def update(self, local_rows: Tensor, rows: Tensor, gradient: Tensor) -> None:
        self.steps += 1
        if (compiled := kernels_for(local_rows)) is not None:
            first, gradient = 0, gradient.contiguous()
            for group in self.groups or [ColumnGroup(local_rows.shape[1], self.gamma, self.eps)]:
                compiled.adamw(
                    (local_rows, self.state["m"], self.state["v"]),
                    rows,
                    gradient,
                    (first, group.columns),
                    step=self.steps,
                    gamma=group.gamma * self.pace,
                    betas=self.betas,
                    eps=group.eps,
                    weight_decay=self.weight_decay,
                )
                first += group.columns
            return
        # What a block gathers is still in the cache when it is stored. 16k rows in blocks take a seventh to a quarter
        # less time than all at once at width 32, and half the time at 160.
        on_cpu = local_rows.device.type == "cpu"
        block = max(_BLOCK_ROWS, _BLOCK_VALUES // local_rows.shape[1]) if on_cpu else max(len(rows), 1)
        for some, of_some in zip(rows.split(block), gradient.split(block), strict=True):
            self._update(local_rows, some, of_some)

    def _update(self, local_rows: Tensor, rows: Tensor, gradient: Tensor) -> None:
        # On the CPU the fused kernel rounds what is left after whole vectors (16 values) in another way. With whole
        # vectors only, a row of a replicated table has the same bits on all ranks, wherever it is in their lists.
        tables, count = (local_rows, self.state["m"], self.state["v"]), len(rows)
        added = -count % 4 if rows.device.type == "cpu" else 0
        filled, gradient = (pad(rows, (0, added)), pad(gradient, (0, 0, 0, added))) if added else (rows, gradient)
        gathered = [gather_rows(table, filled) for table in tables]
        if not self.groups:
            self._adamw([*gathered, gradient], self.gamma, self.eps)
        else:
            sizes = [group.columns for group in self.groups]
            parts = [[part.contiguous() for part in value.split(sizes, 1)] for value in (*gathered, gradient)]
            for group, *part in zip(self.groups, *parts, strict=True):
                self._adamw(part, group.gamma, group.eps)
            gathered = [torch.cat(part, 1) for part in parts[:3]]
        for table, value in zip(tables, gathered, strict=True):
            store_rows(table, rows, value[:count])

    def _adamw(self, gathered: Sequence[Tensor], gamma: float, eps: float) -> None:
        """One step of gathered (values, m, v) by their gradient, with the same kernel as the dense parameters."""
        values, m, v, gradient = gathered
        adamw(
            [values],
            [gradient],
            [m],
            [v],
            [],
            [torch.full((), self.steps - 1.0, device=values.device)],  # counted up inside
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=gamma * self.pace,
            beta1=self.betas[0],
            beta2=self.betas[1],
            eps=eps,
            weight_decay=self.weight_decay,
        )


class SGD(_Base):
    """Plain gradient descent, without state."""

    def update(self, local_rows: Tensor, rows: Tensor, gradient: Tensor) -> None:
        self.steps += 1
        self._descend(local_rows, rows, gradient)


class RowwiseAdagrad(_Base):
    """Adagrad with one accumulator per row: the mean square of the row's gradient.

    `square_sum` completes a partial sum of squares over the column shards of the same rows, so that a row
    cut into columns gets the accumulator of the whole row.
    """

    def __init__(
        self,
        local_rows: Tensor,
        *,
        gamma: float,
        weight_decay: float,
        eps: float,
        columns: int,
        square_sum: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        super().__init__(local_rows, gamma=gamma, weight_decay=weight_decay, eps=eps)
        self.columns, self._square_sum = columns, square_sum
        self.state = {"sum": torch.zeros(len(local_rows), dtype=local_rows.dtype, device=local_rows.device)}

    def update(self, local_rows: Tensor, rows: Tensor, gradient: Tensor) -> None:
        self.steps += 1
        squares = self._square_sum(rows, gradient.square().sum(1))
        total = self.state["sum"].index_select(0, rows).add_(squares / self.columns)
        self.state["sum"].index_copy_(0, rows, total)
        self._descend(local_rows, rows, gradient / total.sqrt_().add_(self.eps).unsqueeze(1))


class NoOptimizer:
    """For tables that are not trained: no state, no memory, no step."""

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}
        self.steps, self.pace = 0, 1.0

    def update(self, local_rows: Tensor, rows: Tensor, gradient: Tensor) -> None:
        raise AssertionError("these rows are frozen")
