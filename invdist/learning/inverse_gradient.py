"""The Inverse Gradient: Algorithm 1 of "Inverse Learning with Extremely Sparse Feedback for Recommendation".

One phase-2 step is `InverseGradient.step`, in the order of the paper:

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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from invdist.embeddings import row_moves
from invdist.embeddings.exchange import Exchange, Route
from invdist.embeddings.row_moves import SignStep
from invdist.learning.losses import inverse_dual_loss, log_loss, log_loss_sums
from invdist.learning.stopwatch import Stopwatch
from invdist.learning.strategy import Batch, Record, TrainingDiverged
from invdist.models.recommender import Recommender, Update


class RanksDisagree(RuntimeError):
    """The ranks no longer train the same model."""


def tie_order(candidates: Sequence[float]) -> list[int]:
    """Indices of candidates in the order in which they win ties: 0, then -1, then the shorter step, direct first."""
    c = candidates
    return sorted(range(len(c)), key=lambda i: (c[i] != 0, c[i] != -1, abs(c[i]), c[i] > 0))


def choose(losses: Tensor, order: Tensor) -> Tensor:
    """Index of the smallest finite loss, as a tensor; ties go to the first in `order`, and so does no finite loss."""
    finite = torch.where(losses.isfinite(), losses, math.inf)
    # Not `order[...]`: the host would read a tensor of no dimension to index with it.
    return order.take(finite.take(order).argmin())


def choose_on_host(losses: Sequence[float], order: Sequence[int]) -> int:
    """`choose` of Python numbers."""
    return min(order, key=lambda i: losses[i] if math.isfinite(losses[i]) else math.inf)


class InverseGradient:
    """Phase 2 of Algorithm 1 on one rank, in step with the others."""

    def __init__(self, model: Recommender, *, alpha: float, inner: str, candidates: Sequence[float]) -> None:
        self.model, self.alpha, self.inner, self.candidates = model, alpha, inner, list(candidates)
        device = model.device
        self._tie_order = tie_order(candidates)
        self._order = torch.tensor(self._tie_order, device=device)
        self._multipliers = torch.tensor(self.candidates, device=device)
        self._chosen: float | Tensor = -1.0  # of no step yet
        self._test_square: float | Tensor = 0.0

    def step(self, batch: Batch, exchange: Exchange, watch: Stopwatch) -> Record:
        """One step: U is the unlabeled part of `batch`, V its labeled part; `exchange` is that of (V, U)."""
        model, (route_V, route_U) = self.model, exchange.finish().routes
        with watch("pull"):
            rows_V, rows_U = model.pull(exchange, distinct=[1])

        # 1. The direct gradient g over the global U, and the update vector D = alpha * phi(g).
        with watch("step"):
            loss_U, annotation = inverse_dual_loss(model.logits(rows_U, route_U))
            D = self._direct_step(loss_U, rows_U, route_U)

        # 2. and 3. The loss of every candidate theta + c*D; one all-reduce sums them over the global V.
        with watch("candidates"):
            deltas_V = model.rows.lookup_delta(route_V, D.rows)
            tried = model.try_candidates(rows_V, route_V, deltas_V, D, self.candidates)
            figures = self._reduce(log_loss_sums(tried.logits, batch.label), len(batch.label), annotation.w1, D.square)

        # 4. The smallest loss wins, on every rank alike.
        chosen, c, details = self._choose(figures)

        # 5. Commit, then one gamma step on the log-loss of V at the committed theta.
        with watch("commit"):
            model.add(D, c)
            committed_V = deltas_V.add_to(row_moves.detached(rows_V), c).requires_grad_()
            loss_V = log_loss(model.logits_of_candidate(committed_V, route_V, tried, chosen), batch.label)
            penalty = model.penalty(committed_V, route_V, len(loss_V))
            gradient_V, loss = model.gradient(loss_V.sum(), len(loss_V), committed_V, route_V, penalty, squared=True)
            model.step(gradient_V)
        self._test_square = gradient_V.square
        return Record(loss, details or {}, None if details else lambda: self._details(figures.cpu().numpy()))

    def _direct_step(self, loss: Tensor, rows: Tensor, route: Route) -> Update:
        """The update vector, by the inner rule, with the squared norm of the gradient that it is made of.

        `sign` is what one step of a fresh Adam does, `sgd` leaves the gradient as it is.
        """
        alpha = self.alpha * self.model.pace
        sign = SignStep(alpha) if self.inner == "sign" else None
        found, _ = self.model.gradient(loss.sum(), len(loss), rows, route, squared=True, sign=sign)
        return found if sign is not None else found.map(lambda g: alpha * g)

    def _reduce(self, losses_V: Tensor, pairs_V: int, w1: Tensor, square_g: float | Tensor) -> Tensor:
        """One all-reduce of all that is summed over ranks: float64 `[candidates + 5 + 2 * ranks]`.

        The loss sum of each candidate over V; pairs in V and U; the annotation sum; two squared norms. Then, for each
        rank, its last choice and a checksum of its dense weights, so that ranks that differ are found at their next
        step and can be named.
        """
        comm, device = self.model.comm, self.model.device
        shared = [float(pairs_V), float(len(w1)), w1.sum(), square_g, self._test_square]
        of_rank = [self._chosen, self.model.checksum()] if comm.size > 1 else [0.0, 0.0]
        before, after = 2 * comm.rank, 2 * (comm.size - comm.rank - 1)
        if row_moves.reads_are_free(device):
            values = [*losses_V.tolist(), *map(float, shared), *[0.0] * before, *map(float, of_rank), *[0.0] * after]
            return comm.all_reduce(torch.tensor(values, dtype=torch.float64)).wait()
        # Filled and not uploaded: the host would wait for the copy of each number.
        scalars = [
            value.double() if isinstance(value, Tensor) else losses_V.new_full((), value)
            for value in (*shared, *of_rank)
        ]
        parts = torch.stack(scalars).split([len(shared), len(of_rank)])
        zeros = losses_V.new_zeros(before), losses_V.new_zeros(after)
        return comm.all_reduce(torch.cat([losses_V, parts[0], zeros[0], parts[1], zeros[1]])).wait()

    def _choose(self, figures: Tensor) -> tuple[int | Tensor, float | Tensor, dict[str, Any] | None]:
        """The number and multiplier of the candidate that wins; on the CPU with the details of the step.

        On the CPU a run that diverges stops here, before anything is committed. On a GPU `Record.read` finds it:
        nobody waits for the details here.
        """
        if row_moves.reads_are_free(figures.device):
            details = self._details(figures.numpy())
            number = self.candidates.index(details["direction"])
            self._chosen = float(number)
            return number, details["direction"], details
        chosen = choose(figures[: len(self.candidates)], self._order)
        self._chosen = chosen.double()
        return chosen, self._multipliers.take(chosen), None

    def _details(self, figures: np.ndarray) -> dict[str, Any]:
        """What is recorded of a step, from the sums of `_reduce`. Raises where ranks differ or no loss is finite."""
        C = len(self.candidates)
        losses, (pairs_V, pairs_U, annotated, direct, test) = figures[:C].tolist(), figures[C : C + 5].tolist()
        if self.model.comm.size > 1:
            of_ranks = figures[C + 5 :].tolist()
            self._check_agreement(of_ranks[::2], of_ranks[1::2])
        if not any(map(math.isfinite, losses)):
            raise TrainingDiverged("the training-test loss is not finite at any candidate, not even at pass")
        return {
            "direction": self.candidates[choose_on_host(losses, self._tie_order)],
            "candidates": self.candidates,
            "candidate_losses": [loss / max(pairs_V, 1) for loss in losses],
            "annotation_mean": annotated / max(pairs_U, 1),
            "direct_grad_norm": math.sqrt(direct) if direct >= 0 else math.nan,
            # Of the step before: its sum over ranks travels with this step's all-reduce.
            "test_grad_norm": math.sqrt(test) if test >= 0 else math.nan,
        }

    def _check_agreement(self, chosen: Sequence[float], checksums: Sequence[float]) -> None:
        for what, values in (("direction", chosen), ("dense weights", checksums)):
            odd = [rank for rank, value in enumerate(values) if value != values[0]]
            if odd:
                seen = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
                raise RanksDisagree(
                    f"ranks {odd} differ from rank 0 in their {what} at the last step ({seen}): "
                    "the run is stopped; resume from the last checkpoint and check the hardware of those ranks"
                )
