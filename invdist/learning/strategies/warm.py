"""`ig_warm` and `none_warm`: the inverse gradient and plain training on rows that exposures have warmed."""

from __future__ import annotations

from invdist.config.registry import STRATEGIES
from invdist.learning.strategies.ig import InverseGradientStrategy
from invdist.learning.strategies.none import LogLoss
from invdist.learning.warmup import Warmup, WarmupOptions


@STRATEGIES.register("ig_warm")
class WarmInverseGradient(Warmup, InverseGradientStrategy):
    """As `ig`, from rows that have learned from exposures which items are alike."""

    class Config(InverseGradientStrategy.Config):
        """Options of the inverse gradient, and of the warm start."""

        warmup: WarmupOptions = WarmupOptions()


@STRATEGIES.register("none_warm")
class WarmLogLoss(Warmup, LogLoss):
    """As `none`, from the same rows: what the warm start gives by itself."""

    class Config(LogLoss.Config):
        """Options of the warm start."""

        warmup: WarmupOptions = WarmupOptions()
