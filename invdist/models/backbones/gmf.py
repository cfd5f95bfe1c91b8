"""`gmf`: generalised matrix factorisation."""

from __future__ import annotations

from torch import Tensor, nn

from invdist.config.registry import BACKBONES
from invdist.models.backbone import BIAS_COLUMNS, Backbone, init_linear


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
