"""`neumf`: GMF joined with a tower of layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from invdist.config.registry import BACKBONES
from invdist.embeddings import row_moves
from invdist.embeddings.row_moves import Deltas, UniqueRows, gather_rows, gradient_memory
from invdist.models.backbone import (
    BIAS_COLUMNS,
    Backbone,
    Tried,
    at_candidates,
    autocasts,
    candidate_chunks,
    init_linear,
)
from invdist.models.backbones.neumf_kernels import neumf_kernels
from invdist.models.dropout import Dropout
from invdist.models.flat import views


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
        self.dropout = Dropout(dropout)
        self.output = nn.Linear(2 * dim, 1)
        for layer in (*self.tower, self.output):
            init_linear(layer)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        k = self.dim
        first = self._first(self.dropout(torch.cat([user[..., k : 5 * k], item[..., k : 5 * k]], dim=-1)))
        return self._after(first, user, item)

    def priors(self, prior: float) -> list[tuple[int, float]]:
        """As in `Backbone`, but the columns of the tower have a far higher precision.

        Its dense weights, which have no prior, can make any column loud, and with few labels the tower would know users
        and items by heart. The square of its columns was measured (docs/results.md).
        """
        k, rest = self.dim, self.columns - 5 * self.dim
        product = (k * prior) ** 0.5
        return [(k, product), (4 * k, (4 * k) ** 2 * prior), *([(rest, product)] if rest else [])]

    def of_rows(self, rows: Tensor) -> Tensor:
        if self._drops or autocasts(rows):
            return super().of_rows(rows)
        return _Logits.apply(rows, None, self.dim, self.bias, *self.parameters())

    def of_candidate(self, rows: Tensor, tried: Tried, chosen: int | Tensor) -> Tensor:
        if self._drops or autocasts(rows):
            return super().of_rows(rows)
        return _Logits.apply(rows, tried.of(chosen), self.dim, self.bias, *self.parameters())

    @property
    def _drops(self) -> bool:
        return self.training and self.dropout.p > 0

    def takes_distinct_rows(self) -> bool:
        return row_moves.kernels_for(self.output.weight) is not None and not self._drops

    def of_distinct_rows(self, rows: Tensor, pieces: UniqueRows) -> Tensor:
        return _DistinctLogits.apply(rows, pieces, self.dim, self.bias, *self.parameters())

    def candidate_logits(
        self, rows: Tensor, deltas: Deltas, dense: Tensor, step: Tensor, candidates: Sequence[float]
    ) -> Tensor:
        return self.try_candidates(rows, deltas, dense, step, candidates).logits

    def try_candidates(
        self, rows: Tensor, deltas: Deltas, dense: Tensor, step: Tensor, candidates: Sequence[float]
    ) -> Tried:
        """As in `Backbone`. The first layer has most of the work, and is a product of two sums with c:

        (W + c dW) (x + c dx) + b + c db  =  [W x + b]  +  c [dW x + db + W dx]  +  c^2 [dW dx],

        so its brackets are found once for all candidates, and what has dx only for the rows that the step touches.
        """
        if (compiled := neumf_kernels(rows)) is not None:
            return compiled.candidates(rows, deltas, self.dim, self.bias, dense, step, candidates)
        like = list(self.parameters())
        first, step_first = views(dense, like)[:2], views(step, like)[:2]
        edge = sum(parameter.numel() for parameter in like[:2])
        others = at_candidates(dense[edge:], step[edge:], candidates)
        n = len(rows) // 2
        found = [
            self._try(
                rows.view(2, n, rows.shape[1])[:, some],
                Deltas(deltas.values, deltas.index.view(2, n)[:, some]),
                (first, step_first),
                others,
                candidates,
            )
            for some in candidate_chunks(n, rows.device)
        ]
        logits = found[0][0] if len(found) == 1 else torch.cat([part for part, _ in found], 1)
        return Tried(logits, [layers for _, layers in found])

    def _try(
        self,
        rows: Tensor,
        deltas: Deltas,
        first: tuple[Sequence[Tensor], Sequence[Tensor]],
        others: Tensor,
        candidates: Sequence[float],
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits `[candidates, n]` of rows `[2, n, columns]`, and the outputs of all layers.

        `others` are the weights after the first layer.
        """
        k, n = self.dim, rows.shape[1]
        (weight, bias), (d_weight, d_bias) = first
        brackets = [
            _first_layer(rows, weight, bias, k),
            _first_layer(rows, d_weight, d_bias, k),
            rows.new_zeros((n, len(bias))),
        ]
        product = [rows[0, :, :k], rows[1, :, :k]]
        change = [torch.zeros_like(side) for side in product]
        row_bias = rows[:, :, 5 * k].sum(0) if self.bias else None
        d_row_bias = torch.zeros_like(row_bias) if row_bias is not None else None
        for side in range(2):
            index = deltas.index[side]
            # On a GPU the host does not look how many rows are touched: all are.
            touched = (index >= 0).nonzero().view(-1) if row_moves.reads_are_free(rows.device) else None
            if touched is None:
                added, touched = Deltas(deltas.values, index).dense(), torch.arange(n, device=rows.device)
            else:
                added = deltas.values.index_select(0, index.index_select(0, touched))
            half = slice(4 * k * side, 4 * k * (side + 1))
            tower = added[:, k : 5 * k]
            brackets[1].index_add_(0, touched, tower @ weight[:, half].t())
            brackets[2].index_add_(0, touched, tower @ d_weight[:, half].t())
            change[side].index_copy_(0, touched, added[:, :k])
            if d_row_bias is not None:
                d_row_bias.index_add_(0, touched, added[:, 5 * k])
        layers = [at_candidates(brackets[0], brackets[1], candidates, brackets[2]).relu_()]
        parts = [part.unflatten(1, p.shape) for part, p in zip(*self._split(others), strict=True)]
        *tower, out_weight, out_bias = parts
        for layer_weight, layer_bias in zip(tower[::2], tower[1::2], strict=True):
            layers.append(torch.baddbmm(layer_bias.unsqueeze(1), layers[-1], layer_weight.transpose(1, 2)).relu_())
        user, item = (at_candidates(own, added, candidates) for own, added in zip(product, change, strict=True))
        last = torch.cat([user * item, layers[-1]], -1)
        logits = torch.baddbmm(out_bias.unsqueeze(1), last, out_weight.transpose(1, 2)).squeeze(-1)
        if row_bias is not None and d_row_bias is not None:
            logits += at_candidates(row_bias, d_row_bias, candidates)
        return logits, layers

    def _split(self, others: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The parameters after the first layer, of every candidate, and those whose shapes they have."""
        like = list(self.parameters())[2:]
        return others.split([parameter.numel() for parameter in like], 1), like

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


def _first_layer(rows: Tensor, weight: Tensor, bias: Tensor, k: int) -> Tensor:
    """The first layer of rows `[2, n, columns]`, users first, without copying their columns of the tower."""
    user, item = rows[0, :, k : 5 * k], rows[1, :, k : 5 * k]
    return torch.addmm(bias, user, weight[:, : 4 * k].t()).addmm_(item, weight[:, 4 * k :].t())


class _Logits(torch.autograd.Function):
    """The logits of rows without dropout, and their gradient by hand: `h` are the outputs of the layers after ReLU.

    s = w . [u * v, h_L] + b,   h_l = relu(W_l h_(l-1) + b_l),   and with `g` the gradient of s, from the last layer on
    d_L = (g w) where h_L > 0,  d_(l-1) = (W_l^T d_l) where h_(l-1) > 0,  dW_l = d_l h_(l-1)^T,  db_l = sum of d_l.

    Gradients of rows are written where they belong; autograd would make and add matrices full of zeros. `known` are the
    logits and all h if they were found before.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, known: tuple[Tensor, list[Tensor]] | None, k: int, row_bias: bool, *parameters: Tensor
    ) -> Tensor:
        if known is not None:
            logits, layers = known
        elif (compiled := neumf_kernels(rows)) is not None:
            logits, layers = compiled.logits(rows, k, row_bias, parameters)
        else:
            both = rows.view(2, len(rows) // 2, rows.shape[1])
            product = both[0, :, :k] * both[1, :, :k]
            logits, layers = _after_first(_first_layer(both, parameters[0], parameters[1], k), product, parameters)
            if row_bias:
                logits += both[:, :, 5 * k].sum(0)
        ctx.save_for_backward(rows, *layers, *parameters)
        ctx.k, ctx.row_bias, ctx.layers, ctx.new_gradient = k, row_bias, len(layers), gradient_memory(rows)
        return logits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        k, g = ctx.k, gradients[0]
        rows, *saved = ctx.saved_tensors
        layers, parameters = saved[: ctx.layers], saved[ctx.layers :]
        if (compiled := neumf_kernels(rows)) is not None:
            of_rows = ctx.new_gradient()
            dense = compiled.gradient(rows, k, ctx.row_bias, parameters, layers, g, of_rows)
            return of_rows, None, None, None, *dense
        both = rows.view(2, len(rows) // 2, rows.shape[1])
        d, found = _before_first(g, both[0, :, :k] * both[1, :, :k], layers, parameters)
        of_rows = torch.empty_like(both)
        of_product = g.unsqueeze(1) * parameters[-2][0, :k]
        of_weight = torch.empty_like(parameters[0])
        of_rows[:, :, 5 * k :] = 0.0
        if ctx.row_bias:
            of_rows[:, :, 5 * k] = g
        for side in range(2):
            torch.mul(of_product, both[1 - side, :, :k], out=of_rows[side, :, :k])
            half = slice(4 * k * side, 4 * k * (side + 1))
            torch.mm(d.t(), both[side, :, k : 5 * k], out=of_weight[:, half])
            torch.mm(d, parameters[0][:, half], out=of_rows[side, :, k : 5 * k])
        return of_rows.view_as(rows), None, None, None, of_weight, *found


class _DistinctLogits(torch.autograd.Function):
    """`_Logits` from each distinct row once: the halves of the first layer are found, and led back, once for each row.

    Pairs repeat rows; the sum of `d_1` over the pairs of a row is what its half of the first layer gets.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, pieces: UniqueRows, k: int, row_bias: bool, *parameters: Tensor) -> Tensor:
        weight, bias, index = parameters[0], parameters[1], pieces.inverse
        n = len(index) // 2
        is_user = torch.zeros(len(rows), dtype=torch.bool).index_fill_(0, index[:n], True)
        sides = [is_user.nonzero().view(-1), is_user.logical_not_().nonzero().view(-1)]
        place = torch.empty(len(rows), dtype=torch.int64)
        first, factors, of_side = None, [], []
        for side, chosen in enumerate(sides):
            place.index_copy_(0, chosen, torch.arange(len(chosen)))
            at = place.index_select(0, index[n * side : n * (side + 1)])
            own = gather_rows(rows, chosen)
            half = linear(own[:, k : 5 * k], weight[:, 4 * k * side : 4 * k * (side + 1)], None if side else bias)
            first = gather_rows(half, at) if first is None else first.add_(gather_rows(half, at))
            factors.append(gather_rows(own[:, :k].contiguous(), at))
            of_side.append(own)
        assert first is not None
        product = factors[0] * factors[1]
        logits, layers = _after_first(first, product, parameters)
        if row_bias:
            logits += rows[:, 5 * k].index_select(0, index).view(2, n).sum(0)
        ctx.save_for_backward(rows, *sides, *of_side, *factors, product, *layers, *parameters)
        ctx.pieces, ctx.k, ctx.row_bias, ctx.layers = pieces, k, row_bias, len(layers)
        return logits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        k, g, pieces = ctx.k, gradients[0], ctx.pieces
        rows, *saved = ctx.saved_tensors
        sides, of_side, factors, product = saved[:2], saved[2:4], saved[4:6], saved[6]
        layers, parameters = saved[7 : 7 + ctx.layers], saved[7 + ctx.layers :]
        d, found = _before_first(g, product, layers, parameters)
        of_product = g.unsqueeze(1) * parameters[-2][0, :k]
        of_rows, of_weight = torch.zeros_like(rows), torch.empty_like(parameters[0])
        of_rows[:, :k] = pieces.sum_parts([of_product * factors[1], of_product * factors[0]])
        if ctx.row_bias:
            of_rows[:, 5 * k].index_add_(0, pieces.inverse, g.repeat(2))
        summed = pieces.sum_parts([d, d])  # a pair is an occurrence of its user, and one of its item
        for side, (chosen, own) in enumerate(zip(sides, of_side, strict=True)):
            half = slice(4 * k * side, 4 * k * (side + 1))
            mine = gather_rows(summed, chosen)
            torch.mm(mine.t(), own[:, k : 5 * k], out=of_weight[:, half])
            of_rows[:, k : 5 * k].index_copy_(0, chosen, mine @ parameters[0][:, half])
        return of_rows, None, None, None, of_weight, *found


def _after_first(first: Tensor, product: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Logits from the output of the first layer before its ReLU and the product, and the outputs of all layers."""
    tower, (out_weight, out_bias), k = parameters[2:-2], parameters[-2:], product.shape[1]
    layers = [first.relu_()]
    for layer_weight, layer_bias in zip(tower[::2], tower[1::2], strict=True):
        layers.append(torch.addmm(layer_bias, layers[-1], layer_weight.t()).relu_())
    logits = torch.mv(product, out_weight[0, :k]).addmv_(layers[-1], out_weight[0, k:]).add_(out_bias)
    return logits, layers


def _before_first(
    g: Tensor, product: Tensor, layers: Sequence[Tensor], parameters: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """The gradient of the first layer's output before its ReLU, and those of all parameters but its weight."""
    out_weight, k = parameters[-2], product.shape[1]
    of_output = torch.cat([torch.mv(product.t(), g), torch.mv(layers[-1].t(), g)]).view_as(out_weight)
    found = [g.sum().view(1), of_output]  # from the last parameter to the first
    d = g.unsqueeze(1) * out_weight[0, k:]
    for level in range(len(layers) - 1, 0, -1):
        d = torch.ops.aten.threshold_backward(d, layers[level], 0)
        found += [d.sum(0), d.t() @ layers[level - 1]]
        d = d @ parameters[2 * level]
    d = torch.ops.aten.threshold_backward(d, layers[0], 0)
    found.append(d.sum(0))
    return d, found[::-1]
