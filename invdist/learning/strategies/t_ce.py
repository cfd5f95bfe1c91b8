"""`t_ce`: truncated cross-entropy (Wang et al., WSDM 2021): the worst-fitting positives are left out."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from invdist.config.fields import Count, Section, Share
from invdist.config.registry import STRATEGIES
from invdist.data.stream.blocks import rank_rows
from invdist.embeddings import row_moves
from invdist.embeddings.comm import Comm
from invdist.embeddings.exchange import Exchange
from invdist.learning.losses import log_loss
from invdist.learning.ramp import Ramp
from invdist.learning.strategy import TRAINING_LABELED, Batch, Phase, Record, Setting, Strategy
from invdist.models.recommender import Recommender


@STRATEGIES.register("t_ce")
class TruncatedLogLoss(Strategy):
    """Mean log-loss over the global batch without the largest-loss share of its positives."""

    class Config(Section):
        """Options of the truncated loss."""

        max_drop: Share = 0.1
        """Share of the positives of a batch that is left out in the end."""
        ramp_steps: Count = 30_000
        """Steps over which that share grows linearly from 0."""

    def __init__(self, setting: Setting, model: Recommender) -> None:
        super().__init__(setting, model)
        self.drop = Ramp(self.options.max_drop, self.options.ramp_steps)

    @classmethod
    def phases(cls, setting: Setting) -> tuple[Phase, ...]:
        return (Phase("train", TRAINING_LABELED),)

    def step(self, phase: Phase, batch: Batch, exchange: Exchange) -> Record:
        share = self.drop.next()

        def kept(logits: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            losses = log_loss(logits, batch.label)
            if not row_moves.reads_are_free(losses.device):
                worst = largest_on_device(losses.detach(), batch.label > 0.5, share, self.model.comm, batch.global_rows)
                return losses.masked_fill(worst, 0.0), (~worst).sum()
            positive = (batch.label > 0.5).nonzero().view(-1)
            worst = globally_largest(losses.detach()[positive], share, self.model.comm)
            keep = torch.ones(len(losses), dtype=torch.bool, device=losses.device)
            keep[positive[worst]] = False
            return losses[keep]

        record = self.gamma_step(kept, exchange)
        record.details["drop_rate"] = share
        return record

    def state(self) -> Mapping[str, Tensor]:
        return self.drop.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.drop.load_state(state)


def globally_largest(values: Tensor, share: float, comm: Comm) -> Tensor:
    """Which of this rank's `values` are among the `floor(share * n)` largest of the n values of all ranks.

    Gives their indices. Ties go to the lower rank, then to the lower index, so ranks agree on how many there are.
    Two small collectives: how many values each rank has, and the largest of them.
    """
    if share == 0:
        return values.new_zeros(0, dtype=torch.int64)
    counts = torch.zeros(comm.size, dtype=torch.int64, device=values.device)
    counts[comm.rank] = len(values)
    by_rank = comm.all_reduce(counts).wait().tolist()
    chosen = math.floor(share * sum(by_rank) + 1e-9)  # 0.29 * 100 is just below 29
    offered = [min(chosen, count) for count in by_rank]
    top, index = values.sort(descending=True, stable=True)
    mine = offered[comm.rank]
    everyone = comm.all_to_all(top[:mine].repeat(comm.size), [mine] * comm.size, offered).wait()
    places = everyone.argsort(descending=True, stable=True)[:chosen] - sum(offered[: comm.rank])
    return index[places[(places >= 0) & (places < mine)]]


def largest_on_device(values: Tensor, among: Tensor, share: float, comm: Comm, global_rows: int) -> Tensor:
    """What `globally_largest` finds of `values[among]`, as a mask of `values`, and without a value read by the host.

    Ranks have their shares of `global_rows` values (`rank_rows`), and each sends as many as could be among the largest.
    """
    most = math.floor(share * global_rows + 1e-9)
    none = torch.zeros_like(among)
    if most == 0:
        return none
    parts = [rank_rows(global_rows, rank, comm.size) for rank in range(comm.size)]
    offered = [min(most, high - low) for low, high in parts]
    mine, start = offered[comm.rank], sum(offered[: comm.rank])
    total = comm.all_reduce(among.sum(dtype=torch.float64)).wait()
    top, index = values.masked_fill(~among, -torch.inf).sort(descending=True, stable=True)
    everyone = comm.all_to_all(top[:mine].repeat(comm.size), [mine] * comm.size, offered).wait()
    order = everyone.argsort(descending=True, stable=True)
    place = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
    chosen = place[start : start + mine] < torch.floor(share * total + 1e-9)
    return none.index_copy_(0, index[:mine], chosen)
