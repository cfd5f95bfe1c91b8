"""The logits of `ExposureHead` and their gradient, written out: for training on a CPU.

Vectors and counts are frozen, so most of what autograd would find is not needed: of the features f only the product
`(A x_u) * x_i` has a gradient. Nothing is joined or split but the features themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from invdist.models.backbone import BIAS_COLUMNS
from invdist.models.dropout import Dropout


class HeadLogits(torch.autograd.Function):
    """The columns of the inner backbone, for it to go on with, and what the head adds to the logits `[n]`.

    `rows` `[2n, own + BIAS_COLUMNS + dim]` are trained, users first; `x` `[2n, dim]` and `log_count` `[2n, 1]` are not.
    `dropout` is that of the features that `hidden` reads, and of the hidden units.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        x: Tensor,
        log_count: Tensor,
        own: int,
        dropout: Dropout,
        mix: Tensor,
        direct: Tensor,
        direct_bias: Tensor,
        hidden: Tensor,
        hidden_bias: Tensor,
        output: Tensor,
    ) -> tuple[Tensor, Tensor]:
        n, dim = len(rows) // 2, x.shape[1]
        f = x.new_empty((n, 3 * dim + 2))
        f[:, :dim], f[:, dim : 2 * dim] = x[:n], x[n:]
        torch.mul(linear(x[:n], mix), x[n:], out=f[:, 2 * dim : 3 * dim])
        f[:, 3 * dim], f[:, 3 * dim + 1] = log_count[:n, 0], log_count[n:, 0]
        mask = dropout.mask(f)
        read = f if mask is None else f * mask
        units = linear(read, hidden, hidden_bias).relu_()
        units_mask = dropout.mask(units)
        if units_mask is not None:
            units.mul_(units_mask)
        c = rows[:, own + BIAS_COLUMNS :]
        logits = linear(f, direct, direct_bias).squeeze(1).addmv_(units, output[0])
        logits += rows[:n, own] + rows[n:, own]
        logits += torch.linalg.vecdot(c[:n], x[n:]) + torch.linalg.vecdot(c[n:], x[:n])
        ctx.save_for_backward(x, f, read, units, mask, units_mask, direct, hidden, output)
        ctx.own, ctx.columns = own, rows.shape[1]
        return rows[:, :own].contiguous(), logits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, f, read, units, mask, units_mask, direct, hidden, output = ctx.saved_tensors
        of_inner, g = gradients
        n, dim, product = len(g), x.shape[1], slice(2 * x.shape[1], 3 * x.shape[1])
        own, columns = ctx.own, ctx.columns
        of_rows = of_inner.new_empty((2 * n, columns))
        of_sides = of_rows.view(2, n, columns)
        of_rows[:, :own] = of_inner
        of_sides[:, :, own] = g
        of_rows[:, own + 1 : own + BIAS_COLUMNS] = 0.0
        torch.mul(x.view(2, n, dim).flip(0), g.view(1, n, 1), out=of_sides[:, :, own + BIAS_COLUMNS :])
        of_units = torch.outer(g, output[0]).mul_(units > 0)
        if units_mask is not None:
            of_units.mul_(units_mask)
        of_product = of_units @ hidden[:, product]
        if mask is not None:
            of_product.mul_(mask[:, product])
        of_product.addr_(g, direct[0, product])
        of_mix = of_product.mul_(x[n:]).T @ x[:n]
        row = g.view(1, n)
        return (
            of_rows,
            *(None,) * 4,
            of_mix,
            row @ f,
            row.sum(1),
            of_units.T @ read,
            of_units.sum(0),
            row @ units,
        )


class PriorOfRows(torch.autograd.Function):
    """Half the squared size of rows `[m, columns]`, weighted by a `precision` `[m, groups]` of groups of columns."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, precision: Tensor, groups: list[int]) -> Tensor:
        ctx.save_for_backward(rows, precision)
        ctx.groups = groups
        sizes = torch.stack([torch.linalg.vecdot(part, part) for part in rows.split(groups, 1)], 1)
        return 0.5 * (sizes * precision).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        rows, precision = ctx.saved_tensors
        found = torch.empty_like(rows)
        for part, out, weight in zip(
            *(values.split(ctx.groups, 1) for values in (rows, found)), precision.split(1, 1), strict=True
        ):
            torch.mul(part, weight * gradients[0], out=out)
        return found, None, None
