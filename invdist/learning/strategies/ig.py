"""`ig`: the Inverse Gradient, which includes the inverse dual loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from invdist.config.fields import Count, Positive, Section
from invdist.config.registry import STRATEGIES
from invdist.embeddings.exchange import Exchange
from invdist.learning.inverse_gradient import InverseGradient
from invdist.learning.losses import log_loss
from invdist.learning.strategy import Batch, Phase, Record, Setting, Strategy
from invdist.models.recommender import Recommender


@STRATEGIES.register("ig")
class InverseGradientStrategy(Strategy):
    """Phase 1 on training-train, then phase 2 on training-test with unlabeled batches, every epoch."""

    class Config(Section):
        """Options of the Inverse Gradient."""

        alpha: Positive | None = None
        """Step of the direct gradient; null: alpha_ratio * optimizer.gamma."""
        alpha_ratio: Positive = 0.1
        """alpha over gamma where alpha is null (the paper: 0.1)."""
        inner: Literal["sign", "sgd"] = "sign"
        """How the direct gradient becomes an update: sign (one step of a fresh Adam) or sgd (as it is)."""
        candidates: list[float] = [-1.0, 0.0, 1.0]
        """Multipliers of the update that are tried: -1 direct, 0 pass, 1 inverse; more make a line search."""
        phase2_passes: Count = 1
        """Passes of phase 2 over the training-test interactions in one epoch."""
        turns: Count = 1
        """How often an epoch changes from phase 1 to phase 2 (the paper: once). With more, training-test rows are
        spread among the others, and an epoch does not end with a long run of them."""

        def check(self) -> Iterator[tuple[str, str]]:
            """Problems of the list of candidates, as (field, what is wrong)."""
            if 0.0 not in self.candidates or len(self.candidates) < 2:
                yield "candidates", "expected 0 (pass) and at least one other multiplier, such as [-1, 0, 1]"
            if len(set(self.candidates)) != len(self.candidates):
                yield "candidates", f"{self.candidates} names a multiplier twice"

    def __init__(self, setting: Setting, model: Recommender) -> None:
        super().__init__(setting, model)
        o = self.options
        alpha = o.alpha_ratio * setting.gamma if o.alpha is None else o.alpha
        self.inverse_gradient = InverseGradient(model, alpha=alpha, inner=o.inner, candidates=o.candidates)

    @classmethod
    def phases(cls, setting: Setting) -> tuple[Phase, ...]:
        o, rate = setting.options, setting.needed_rate()
        turns = [
            (
                Phase("phase1", ("train",), part=(turn, o.turns)),
                Phase("phase2", ("training_test",), rate, o.phase2_passes, part=(turn, o.turns)),
            )
            for turn in range(o.turns)
        ]
        return tuple(phase for turn in turns for phase in turn)

    def step(self, phase: Phase, batch: Batch, exchange: Exchange) -> Record:
        if phase.name == "phase1":
            return self.gamma_step(lambda logits: log_loss(logits, batch.label), exchange)
        return self.inverse_gradient.step(batch, exchange, self.watch)
