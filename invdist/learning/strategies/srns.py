"""`srns`: robust negative sampling (Ding et al., NeurIPS 2020): hard negatives that are not false ones.

An item that a user would like scores high at every look; a true negative that is hard scores high now and then.
So a memory of candidates per user prefers a high score and a high variance of past scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple

import torch
from annotated_types import Ge
from torch import Tensor

from invdist.config.fields import Count, NonNegative, Positive
from invdist.config.registry import STRATEGIES
from invdist.embeddings import row_moves
from invdist.embeddings.exchange import Exchange, Pairs
from invdist.learning.candidate_memory import CandidateMemory, noise_of
from invdist.learning.ramp import Ramp
from invdist.learning.strategies.ns import NegativeSampling
from invdist.learning.strategy import TRAINING_LABELED, Batch, Phase, Record, Setting, unlabeled
from invdist.models.recommender import Recommender
from invdist.runtime.errors import UserError


class _Asked(NamedTuple):
    """Users in ascending order, each with the fresh candidates of its first row.

    They are distinct. On a GPU there is one for each of the given rows: the host does not read how many are distinct.
    """

    user: Tensor
    """`[m]`"""
    fresh: Tensor
    """`[m, S2]`"""
    row: Tensor
    """Which of the users each of the given rows belongs to: `[n]`."""
    first: Tensor
    """The first row of each user: `[m]`."""

    @property
    def pairs(self) -> Pairs:
        """Every user with each of its fresh candidates."""
        return Pairs(self.user.repeat_interleave(self.fresh.shape[1]), self.fresh.reshape(-1))


@STRATEGIES.register("srns")
class RobustNegativeSampling(NegativeSampling):
    """As `ns`, the unlabeled rows being the best of a memory of candidates per user, cut over ranks by user."""

    class Config(NegativeSampling.Config):
        """Options of robust negative sampling."""

        memory: Count = 16
        """Candidate items kept for each user (S1 of the paper); at least unlabeled.rate."""
        fresh: Count = 16
        """Random candidates that are compared with a user's memory when it is refreshed (S2)."""
        history: Annotated[int, Ge(2)] = 5
        """Past scores kept for each candidate."""
        temperature: Positive = 1.0
        """Candidates stay in memory with probability ~ exp(score / temperature)."""
        variance_weight: NonNegative = 1.0
        """Final weight of the standard deviation of past scores, relative to the score."""
        ramp_steps: Count = 10_000
        """Steps over which that weight grows linearly from 0."""

    def __init__(self, setting: Setting, model: Recommender) -> None:
        super().__init__(setting, model)
        o, comm = self.options, model.comm
        self.variance = Ramp(o.variance_weight, o.ramp_steps)
        self._block = -(-setting.users // comm.size)
        first = min(comm.rank * self._block, setting.users)
        here = min(self._block, setting.users - first)
        self.memory = CandidateMemory(first, here, o.memory, o.history, model.device)

    @classmethod
    def phases(cls, setting: Setting) -> tuple[Phase, ...]:
        o, rate = setting.options, setting.needed_rate()
        if rate > o.memory:
            raise UserError(
                f"srns.memory: {o.memory} candidates of a user cannot give unlabeled.rate={rate} negatives; "
                f"expected at least {rate}"
            )
        return (Phase("train", TRAINING_LABELED, o.fresh, source="sampled"),)

    def groups(self, phase: Phase, batch: Batch) -> tuple[Pairs, ...]:
        return (self.model.ids_to_fetch(self._ask(batch).pairs),)

    def step(self, phase: Phase, batch: Batch, exchange: Exchange) -> Record:
        rate = self.setting.unlabeled_rate
        with self.watch("candidates"), torch.no_grad():
            asked = self._ask(batch)
            fresh_logit = self.model.score_fetched(exchange, asked.pairs)
            item = self._from_owners(asked, fresh_logit.view_as(asked.fresh))
            user = asked.user[asked.row].repeat_interleave(rate)
            chosen = Pairs(user, item[asked.row].view(-1))
        return self.step_with(batch, chosen)

    def _ask(self, batch: Batch) -> _Asked:
        # All fresh candidates of a row have one user: its own, unless that one has seen everything.
        pairs, fresh = unlabeled(batch), self.options.fresh
        return _first_of_each(pairs.user.view(-1, fresh)[:, 0], pairs.item.view(-1, fresh))

    def _from_owners(self, asked: _Asked, fresh_logit: Tensor) -> Tensor:
        """The negatives of each asked user `[m, rate]`, from the rank that keeps its memory.

        Users are in ascending order, so those of one owner are contiguous, in order of owner.
        """
        comm = self.model.comm
        edges = torch.arange(comm.size + 1, device=asked.user.device) * self._block
        sent = torch.diff(torch.searchsorted(asked.user, edges))
        received = comm.all_to_all(sent, [1] * comm.size, [1] * comm.size).wait()
        sizes = comm.to_host(torch.stack([sent, received])).tolist() if comm.size > 1 else [[len(asked.user)]] * 2
        # Ids and float32 scores are exact in float64, and so travel together.
        payload = torch.cat([asked.user.unsqueeze(1), asked.fresh, fresh_logit.double()], 1)
        arrived = comm.all_to_all(payload, *sizes).wait()
        answer = self._refresh(arrived)
        return comm.all_to_all(answer, *reversed(sizes)).wait()

    def _refresh(self, arrived: Tensor) -> Tensor:
        """Refreshes the memory of the users asked for, and gives the negatives of each asking row `[rows, rate]`.

        Ranks ask in order, so where several ask for a user the first in the order of the global batch counts.
        """
        o, memory = self.options, self.memory
        user, fresh = arrived[:, 0].long(), arrived[:, 1 : 1 + o.fresh].long()
        asked = _first_of_each(user, fresh)
        fresh_logit = arrived[asked.first, 1 + o.fresh :].float()
        kept = memory.items(asked.user)
        pairs = Pairs(asked.user.repeat_interleave(o.memory), kept.clamp(min=0).view(-1))
        logit = self.model.score(pairs).view_as(kept)
        noise = noise_of(self.setting.seed, self.variance.done)
        memory.refresh(asked.user, logit, asked.fresh, fresh_logit, temperature=o.temperature, noise=noise)
        return memory.best(asked.user, self.setting.unlabeled_rate, self.variance.next())[asked.row]

    def state(self) -> Mapping[str, Tensor]:
        return self.variance.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.variance.load_state(state)

    def grow_state(self, state: Mapping[str, Tensor], users: Tensor, items: Tensor) -> None:
        self.load_state(state)
        self.memory.renumber(items)

    def sharded_state(self) -> Mapping[str, tuple[int, Tensor]]:
        return {"item": (self.memory.first, self.memory.item), "past": (self.memory.first, self.memory.past)}


def _first_of_each(user: Tensor, fresh: Tensor) -> _Asked:
    number = torch.arange(len(user), device=user.device)
    if row_moves.reads_are_free(user.device):
        distinct, row = user.unique(return_inverse=True)
        first = torch.full_like(distinct, len(user)).scatter_reduce_(0, row, number, "amin")
        return _Asked(distinct, fresh[first], row, first)
    ordered, order = torch.sort(user, stable=True)
    first = order.index_select(0, torch.searchsorted(ordered, ordered))
    row = torch.empty_like(order).index_copy_(0, order, number)
    return _Asked(ordered, fresh.index_select(0, first), row, first)
