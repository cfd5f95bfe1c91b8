"""The Inverse Gradient: Algorithm 1 of "Inverse Learning with Extremely Sparse Feedback for Recommendation".

The only place that knows candidates. One phase-2 step is `InverseGradient.step`, in the paper's order:

    theta    all parameters: the sharded rows of every rank and the dense ones
    U, V     an unlabeled batch and a training-test batch, global over all ranks
    g        gradient of the mean inverse dual loss over U at theta
    D        alpha * phi(g), the update vector
    c        the multiplier of D: -1 direct, 0 pass, +1 inverse
    gamma    the step that every strategy takes
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from invdist.embeddings.exchange import Exchange
from invdist.learning.losses import inverse_dual_loss, log_loss
from invdist.learning.stopwatch import Stopwatch
from invdist.learning.strategy import Batch, Record
from invdist.models.recommender import Recommender, Update, moved
from invdist.runtime.errors import UserError

_SIGN_EPS = 1e-8


class TrainingDiverged(UserError):
    """No candidate has a finite loss: nothing sensible can be committed."""


class RanksDisagree(RuntimeError):
    """The ranks no longer train the same model."""


def phi(gradient: Tensor, inner: str) -> Tensor:
    """The inner rule: `sign` is what one step of a fresh Adam does, `sgd` leaves the gradient as it is."""
    return gradient / gradient.abs().add_(_SIGN_EPS) if inner == "sign" else gradient


def choose(losses: Sequence[float], candidates: Sequence[float]) -> int:
    """Index of the winner: the smallest finite loss; ties go to 0, then to -1, then to the shorter step.

    Raises `TrainingDiverged` if no loss is finite.
    """
    finite = [i for i, loss in enumerate(losses) if math.isfinite(loss)]
    if not finite:
        raise TrainingDiverged("the training-test loss is not finite at any candidate, not even at pass")
    c = candidates
    return min(finite, key=lambda i: (losses[i], c[i] != 0, c[i] != -1, abs(c[i]), c[i] > 0))


class InverseGradient:
    """Phase 2 of Algorithm 1 on one rank, in step with the others."""

    def __init__(self, model: Recommender, *, alpha: float, inner: str, candidates: Sequence[float]) -> None:
        self.model, self.alpha, self.inner, self.candidates = model, alpha, inner, list(candidates)
        self._chosen = -1  # of no step yet
        self._test_square = torch.zeros((), device=model.device)

    def step(self, batch: Batch, exchange: Exchange, watch: Stopwatch) -> Record:
        """One step: U is the unlabeled part of `batch`, V its labeled part; `exchange` is that of (V, U)."""
        model, (route_V, route_U) = self.model, exchange.finish().routes
        with watch("pull"):
            rows_V, rows_U = model.pull(exchange)

        # 1. The direct gradient over the global U, and the update vector.
        with watch("step"):
            loss_U, annotation = inverse_dual_loss(model.logits(rows_U, route_U))
            g, _ = model.gradient(loss_U.sum(), len(loss_U), rows_U, route_U)
            D = g.map(lambda value: self.alpha * phi(value, self.inner))

        # 2. and 3. All candidates theta + c*D in one forward; one all-reduce of their losses over the global V.
        with watch("candidates"):
            deltas_V = model.rows.lookup_delta(route_V, D.rows)
            logits = model.candidate_logits(rows_V, route_V, deltas_V, D, self.candidates)
            losses, details = self._reduce(log_loss(logits, batch.label), annotation.w1, g)

        # 4. The smallest wins, on every rank alike.
        self._chosen = choose(losses, self.candidates)
        c = self.candidates[self._chosen]

        # 5. Commit, then one gamma step on the log-loss of V at the committed theta.
        with watch("commit"):
            model.add(D, c)
            committed_V = moved(rows_V.detach(), deltas_V, c).requires_grad_()
            loss_V = log_loss(model.logits(committed_V, route_V), batch.label)
            gradient_V, loss = model.gradient(loss_V.sum(), len(loss_V), committed_V, route_V)
            model.step(gradient_V)
        self._test_square = self._square(gradient_V)
        return Record(loss, {"direction": c, "candidates": self.candidates, "candidate_losses": losses, **details})

    def _reduce(self, losses_V: Tensor, w1: Tensor, g: Update) -> tuple[list[float], dict[str, float]]:
        """One all-reduce of everything that is summed over ranks.

        Gives the mean loss of each candidate over the global V (`losses_V` is `[candidates, n]`), and figures to
        record. With it travel the choice that each rank made last and a checksum of its dense weights, so that
        ranks that parted are found at their next step, by name.
        """
        comm, C = self.model.comm, len(self.candidates)
        own = torch.tensor([[rank == comm.rank] for rank in range(comm.size)], device=self.model.device)
        known = [losses_V.shape[1], len(w1), self._chosen]
        rows_V, rows_U, chosen = losses_V.new_tensor(known, dtype=torch.float64).unbind()
        shared = [rows_V, rows_U, w1.sum(), self._square(g), self._test_square]
        by_rank = torch.where(own, torch.stack([chosen, self.model.checksum()]), 0.0)
        figures = torch.cat([losses_V.sum(1, dtype=torch.float64), torch.stack(shared), by_rank.view(-1)])
        figures = comm.all_reduce(figures).wait().tolist()
        rows_V, rows_U, annotated, direct, test = figures[C : C + 5]
        self._check_agreement(figures[C + 5 :: 2], figures[C + 6 :: 2])
        details = {
            "annotation_mean": annotated / max(rows_U, 1),
            "direct_grad_norm": math.sqrt(direct) if direct >= 0 else math.nan,
            # Of the step before: its sum over ranks rides on this step's all-reduce.
            "test_grad_norm": math.sqrt(test) if test >= 0 else math.nan,
        }
        return [loss / max(rows_V, 1) for loss in figures[:C]], details

    def _square(self, gradient: Update) -> Tensor:
        """This rank's share of the squared norm of a global gradient."""
        replicas = self.model.comm.size
        rows = gradient.rows.values.view(-1)
        square = rows.dot(rows) / (replicas if self.model.rows.layout.replicated else 1)
        return square + gradient.dense.dot(gradient.dense) / replicas

    def _check_agreement(self, chosen: list[float], checksums: list[float]) -> None:
        for what, values in (("direction", chosen), ("dense weights", checksums)):
            odd = [rank for rank, value in enumerate(values) if not _same(value, values[0])]
            if odd:
                seen = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
                raise RanksDisagree(
                    f"ranks {odd} parted from rank 0 in their {what} at the last step ({seen}): "
                    "the run is stopped; resume from the last checkpoint and check the hardware of those ranks"
                )


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))
