"""Whether further CPU ranks on one host pay: a model of the time of a step, fitted to measurements.

    step(B, R) = (B / R) * pair + [R > 1] * (B / R) * columns * CARRIED + (R - 1) * (EXCHANGE + weights * REDUCED)

B is the batch of all ranks, R their number, `pair` what a pair costs to compute. A rank takes over computing, and
brings messages that every step waits for. `invdist bench ranks --parts crossover` measures both; docs/benchmarks.md has
the figures beside those of this model. Measured with two ranks; that more cost as much each is an assumption. Ranks on
several hosts and on GPUs are not covered.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from invdist.embeddings.comm import Comm
from invdist.embeddings.shared_memory import SharedMemoryComm
from invdist.models.backbone import Backbone

EXCHANGE_US, REDUCED_US = 650.0, 0.002
"""What the messages of a step cost, however small they are, and for each dense weight, whose gradient is summed."""
CARRIED_US = 0.0031
"""What a column of a pair's rows costs on its way to its rank and back."""
COLUMN_US, WEIGHT_US = 0.0076, 8e-5
"""What a pair costs on one core, by columns of a row and by dense weights."""
THREADS_US = 4500.0
"""Threads pay in a step that is computed so long on one core. While they wait for work they keep their cores from
readers: runs on MovieLens-1M with two threads instead of one are a tenth slower for GMF with 1,024 a step, no faster
with 8,192 and 16,384, and a quarter faster for NeuMF with 1,024."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a pair costs, from the size of the model."""

    columns: int
    weights: int

    @classmethod
    def of(cls, backbone: Backbone) -> StepCost:
        """The cost of a backbone, whose parameters may be without memory."""
        return cls(backbone.columns, sum(parameter.numel() for parameter in backbone.parameters()))

    @property
    def exchange_us(self) -> float:
        """Microseconds that the messages of a further rank cost, whatever the batch."""
        return EXCHANGE_US + self.weights * REDUCED_US

    @property
    def pair_us(self) -> float:
        """Microseconds that a pair is computed."""
        return self.columns * COLUMN_US + self.weights * WEIGHT_US

    def step_us(self, batch: int, ranks: int) -> float:
        """Microseconds of a step, beyond what every step costs."""
        own = batch / ranks
        carried = own * self.columns * CARRIED_US if ranks > 1 else 0.0
        return own * self.pair_us + carried + (ranks - 1) * self.exchange_us

    def pays(self, batch: int, ranks: int) -> bool:
        """Whether so many ranks on one host take less time for a step than one."""
        return self.step_us(batch, ranks) < self.step_us(batch, 1)

    def least_batch(self, ranks: int) -> int | None:
        """The smallest batch at which they do; None: they never do."""
        saved = self.pair_us * (1 - 1 / ranks) - self.columns * CARRIED_US / ranks
        return int((ranks - 1) * self.exchange_us / saved) + 1 if saved > 0 else None

    def best_ranks(self, batch: int, most: int) -> int:
        """The number of ranks, up to `most`, with the shortest step."""
        return min(range(1, min(most, batch) + 1), key=lambda ranks: self.step_us(batch, ranks))


def threads_pay(cost: StepCost, batch: int) -> bool:
    """Whether a worker that is alone takes less time for a step with as many threads as cores than with one."""
    return batch * cost.pair_us >= THREADS_US


def own_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def too_many_ranks(comm: Comm, backbone: Backbone, batch: int) -> str | None:
    """What to tell somebody who trains with too many CPU ranks on one host; None: nothing."""
    cost, ranks = StepCost.of(backbone), comm.size
    if not isinstance(comm, SharedMemoryComm) or cost.pays(batch, ranks):
        return None
    least = cost.least_batch(ranks)
    pays = f"pay from about {least:,} interactions a step" if least else "never pay for this model"
    threads = f" ray.cpus_per_worker={ranks}" if threads_pay(cost, batch) else ""
    return (
        f"{ranks} workers on one machine with {batch:,} interactions a step: their messages cost more than they save "
        f"({ranks} {pays}). ray.workers=1{threads} is faster and gives the same result, or let "
        "ray.workers=auto choose"
    )
