"""`ns`: negative sampling, that is, unlabeled pairs taken as negatives."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import softplus

from invdist.config.registry import STRATEGIES
from invdist.learning.mixture import Mixture


@STRATEGIES.register("ns")
class NegativeSampling(Mixture):
    """Mean log-loss of labeled rows + weight * mean `l0` of unlabeled rows."""

    def unlabeled_loss(self, logits: Tensor) -> Tensor:
        return softplus(logits)
