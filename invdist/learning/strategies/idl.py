"""`idl`: the inverse dual loss on unlabeled rows, without the inverse gradient."""

from __future__ import annotations

from torch import Tensor

from invdist.config.registry import STRATEGIES
from invdist.learning.losses import inverse_dual_loss
from invdist.learning.mixture import Mixture


@STRATEGIES.register("idl")
class InverseDualLoss(Mixture):
    """Mean log-loss of labeled rows + weight * mean inverse dual loss of unlabeled rows."""

    def unlabeled_loss(self, logits: Tensor) -> Tensor:
        return inverse_dual_loss(logits)[0]
