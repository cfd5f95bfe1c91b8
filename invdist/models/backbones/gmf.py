"""`gmf`: generalised matrix factorisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from invdist.config.registry import BACKBONES
from invdist.embeddings.row_moves import Deltas, gradient_memory, kernels_for
from invdist.models.backbone import BIAS_COLUMNS, Backbone, Tried, at_candidates, autocasts, init_linear


@BACKBONES.register("gmf")
class GMF(Backbone):
    """Generalised matrix factorisation: the elementwise product into one linear output."""

    def __init__(self, dim: int, dropout: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        del dropout  # GMF has no tower to drop from
        self.dim, self.bias = dim, bias
        self.columns = dim + BIAS_COLUMNS * bias
        self.output = nn.Linear(dim, 1)
        init_linear(self.output)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        logit = self.output(user[..., : self.dim] * item[..., : self.dim]).squeeze(-1)
        return logit + user[..., self.dim] + item[..., self.dim] if self.bias else logit

    def of_rows(self, rows: Tensor) -> Tensor:
        if kernels_for(rows) is None or autocasts(rows):
            return super().of_rows(rows)
        return _Logits.apply(rows, None, self.output.weight, self.output.bias, self.bias)

    def of_candidate(self, rows: Tensor, tried: Tried, chosen: int | Tensor) -> Tensor:
        if kernels_for(rows) is None or autocasts(rows):
            return super().of_candidate(rows, tried, chosen)
        known, _ = tried.of(chosen)
        return _Logits.apply(rows, known, self.output.weight, self.output.bias, self.bias)

    def candidate_logits(
        self, rows: Tensor, deltas: Deltas, dense: Tensor, step: Tensor, candidates: Sequence[float]
    ) -> Tensor | None:
        """As in `Backbone`. The logit is a product of three sums with c, so a polynomial of degree 3 in c: its
        coefficients are found once for all candidates.
        """
        compiled = kernels_for(rows)
        if compiled is None:
            user, item = at_candidates(rows, deltas.dense(), candidates).chunk(2, 1)
            dense = at_candidates(dense, step, candidates)
            product = user[..., : self.dim] * item[..., : self.dim]
            logits = torch.baddbmm(dense[:, -1:, None], product, dense[:, :-1, None]).squeeze(-1)
            return logits + user[..., self.dim] + item[..., self.dim] if self.bias else logits
        return compiled.gmf_candidates(rows, deltas.index, deltas.values, dense, step, self.bias, candidates)


class _Logits(torch.autograd.Function):
    """The logits of rows u (user) and v (item) as one kernel, and their gradient as another.

    s = w . (u * v) + b,    ds/du = w * v,    ds/dv = w * u,    ds/dw = u * v,    ds/db = 1,
    and 1 for the bias columns of both rows. `known` are the logits if they were found before.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, known: Tensor | None, weight: Tensor, bias: Tensor, row_bias: bool) -> Tensor:
        compiled = kernels_for(rows)
        assert compiled is not None
        ctx.save_for_backward(rows, weight)
        ctx.row_bias, ctx.new_gradient = row_bias, gradient_memory(rows)
        return compiled.gmf_logits(rows.contiguous(), weight, bias, row_bias) if known is None else known

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        compiled = kernels_for(rows)
        assert compiled is not None
        of_rows, of_logits = ctx.new_gradient(), gradients[0].contiguous()
        dense = compiled.gmf_gradient(rows.contiguous(), weight, ctx.row_bias, of_logits, of_rows)
        return of_rows, None, dense[:-1].view_as(weight), dense[-1:], None
