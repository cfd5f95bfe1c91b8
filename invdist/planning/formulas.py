"""What a step of this engine costs, as arithmetic. Nothing here imports torch, and nothing is measured.

Symbols, as in the design of the exchange (`invdist.embeddings.store`):

    G          ranks, one GPU each
    n          labeled pairs of a rank and step: batch / G, rounded up
    u          unlabeled pairs of a rank in an inverse-gradient step: rate * n
    W          columns of a row (dim for GMF, 5 * dim for NeuMF)
    P          dense parameters
    C          candidates
    cell       a row, or one column shard of it, as it travels: 8 bytes of id, 4 bytes a column

A pair asks for one cell of each table and piece. What stays on its rank is not sent. A cell that several pairs of a
rank ask for is sent once; the formulas count it for each of them, which is an upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FLOAT, ID, DOUBLE = 4, 8, 8
"""Bytes of a value, of an id or count, of a candidate loss."""

OPTIMIZER_FLOATS = {"adam": 2.0, "sgd": 0.0, "rowwise_adagrad": 0.0}
"""State values per row value; row-wise Adagrad keeps one value per row instead."""

PLAIN_OPERATORS, IG_OPERATORS = 150, 475
"""Operators that one step launches, counted on NeuMF with one rank; GMF launches fewer."""


@dataclass(frozen=True)
class Spread:
    """How one table lies on the ranks: its sharding, and the owner of each piece (row-wise: not needed)."""

    sharding: str
    columns: int
    owners: tuple[int, ...] = (0,)

    def asked(self, rank: int, ranks: int, pairs: int) -> float:
        """Cells that the `pairs` of a rank ask of other ranks (row-wise: expected, ids being spread evenly)."""
        if self.sharding == "row_wise":
            return pairs * (ranks - 1) / ranks
        if self.sharding == "data_parallel":
            return pairs * (ranks - 1)  # every other rank is told, since it must make the same update
        return pairs * sum(owner != rank for owner in self.owners)

    def answered(self, rank: int, ranks: int, pairs: int) -> float:
        """Cells that the other ranks, with `pairs` each, ask of this one."""
        if self.sharding in ("row_wise", "data_parallel"):
            return self.asked(rank, ranks, pairs)
        return pairs * (ranks - 1) * sum(owner == rank for owner in self.owners)

    @property
    def width(self) -> int:
        """Columns of a cell."""
        return self.columns // len(self.owners) if self.sharding == "column_wise" else self.columns


@dataclass(frozen=True)
class Job:
    """What is to be trained: everything the formulas need to know."""

    users: int
    items: int
    columns: int
    dense: int
    """Dense parameters, P."""
    saved: int
    """Values that the backward pass of one pair keeps, beside its rows."""
    batch: int
    """Labeled rows per step over all ranks."""
    ranks: int
    rate: int = 1
    """Unlabeled rows per row of a training-test batch."""
    candidates: int = 3
    optimizer: str = "adam"

    @property
    def pairs(self) -> int:
        """Labeled pairs of the fullest rank, n."""
        return -(-self.batch // self.ranks)

    @property
    def unlabeled(self) -> int:
        """Unlabeled pairs of a rank in an inverse-gradient step, u."""
        return self.rate * self.pairs

    @property
    def row_bytes(self) -> float:
        """Bytes of one table row with its optimizer state."""
        extra = FLOAT if self.optimizer == "rowwise_adagrad" else 0
        return self.columns * FLOAT * (1 + OPTIMIZER_FLOATS[self.optimizer]) + extra


@dataclass(frozen=True)
class Traffic:
    """Bytes that the busiest rank sends in one step, by what they are, and how many collectives carry them."""

    ids: float
    """Ids to their owners, and how many of them."""
    rows: float
    gradients: float
    deltas: float
    losses: float
    """The all-reduce of candidate losses."""
    dense: float
    """The all-reduces of dense gradients."""
    all_to_alls: int
    all_reduces: int

    @property
    def total(self) -> float:
        """All bytes."""
        return self.ids + self.rows + self.gradients + self.deltas + self.losses + self.dense


def all_reduce_bytes(size: float, ranks: int) -> float:
    """Bytes a rank sends in a ring all-reduce of `size` bytes: everything twice, less its own share."""
    return 2 * size * (ranks - 1) / ranks


def plain_traffic(job: Job, spreads: Sequence[Spread], rank: int = 0) -> Traffic:
    """A log-loss step: ids out, rows in, gradients back, one dense all-reduce."""
    if job.ranks == 1:
        return Traffic(0, 0, 0, 0, 0, 0, 0, 0)
    replicated = any(spread.sharding == "data_parallel" for spread in spreads)
    asked, asked_bytes, answered_bytes = _cells(job, spreads, rank, job.pairs)
    return Traffic(
        ids=asked * ID + _counts(job, groups=1),
        rows=0 if replicated else answered_bytes,
        gradients=asked_bytes,
        deltas=0,
        losses=0,
        dense=all_reduce_bytes(_dense_message(job), job.ranks),
        all_to_alls=3 if replicated else 4,
        all_reduces=1,
    )


def ig_traffic(job: Job, spreads: Sequence[Spread], rank: int = 0) -> Traffic:
    """An inverse-gradient step: ids and rows of U and V together, gradients of U, deltas of V, candidate losses,
    gradients of V, two dense all-reduces."""
    if job.ranks == 1:
        return Traffic(0, 0, 0, 0, 0, 0, 0, 0)
    replicated = any(spread.sharding == "data_parallel" for spread in spreads)
    asked_V, asked_bytes_V, answered_bytes_V = _cells(job, spreads, rank, job.pairs)
    asked_U, asked_bytes_U, answered_bytes_U = _cells(job, spreads, rank, job.unlabeled)
    # Beside the losses: row counts, the annotation mean, two norms, and each rank's last choice and checksum.
    figures = job.candidates + 5 + 2 * job.ranks
    return Traffic(
        ids=(asked_V + asked_U) * ID + _counts(job, groups=2),
        rows=0 if replicated else answered_bytes_V + answered_bytes_U,
        gradients=asked_bytes_V + asked_bytes_U,
        deltas=0 if replicated else answered_bytes_V,
        losses=all_reduce_bytes(figures * DOUBLE, job.ranks),
        dense=2 * all_reduce_bytes(_dense_message(job), job.ranks),
        all_to_alls=4 if replicated else 6,
        all_reduces=3,
    )


def busiest(job: Job, spreads: Sequence[Spread], inverse_gradient: bool) -> Traffic:
    """The traffic of the rank that sends most: all alike row-wise, the owner of a table otherwise."""
    kind = ig_traffic if inverse_gradient else plain_traffic
    ranks = {owner for spread in spreads for owner in spread.owners} | {job.ranks - 1}
    return max((kind(job, spreads, rank) for rank in ranks), key=lambda traffic: traffic.total)


def plain_working_bytes(job: Job) -> float:
    """Memory that a log-loss step works in, beside tables and dense state; nothing is freed before its end.

    Ten buffers of the pulled rows: answered, arrived, in order; their gradient, in sending order, arrived, summed,
    scaled; and the two moments of touched rows. Eight index arrays for each of three steps under way (ids travel
    two steps ahead). Saved values of the tower and their gradients.
    """
    return 10 * _rows(job, job.pairs) + _indices(job.pairs) + 2 * job.saved * job.pairs * FLOAT


def ig_added_bytes(job: Job) -> float:
    """What an inverse-gradient step needs on top of a plain one.

    Of U: eight buffers as above, and three of its update. Of V: deltas answered, arrived and in order, the
    committed rows, and every candidate's stacked rows and tower. No term grows with the tables.
    """
    of_U = 11 * _rows(job, job.unlabeled) + _indices(job.unlabeled) + 2 * job.saved * job.unlabeled * FLOAT
    of_V = (4 + job.candidates) * _rows(job, job.pairs) + job.candidates * job.saved * job.pairs * FLOAT
    return of_U + of_V + (2 + job.candidates) * job.dense * FLOAT


def dense_bytes(job: Job) -> float:
    """Dense parameters with gradient and optimizer state."""
    state = 1.0 if job.optimizer == "rowwise_adagrad" else OPTIMIZER_FLOATS[job.optimizer]
    return job.dense * FLOAT * (2 + state)


def memory_traffic(job: Job, inverse_gradient: bool) -> float:
    """Bytes a step moves in a device's memory: every buffer written and read once, touched rows and their state
    read and written."""
    moved = 2 * plain_working_bytes(job) + 2 * (1 + OPTIMIZER_FLOATS[job.optimizer]) * _rows(job, job.pairs)
    if inverse_gradient:
        moved += 2 * ig_added_bytes(job) + 3 * _rows(job, job.unlabeled)
    return moved


def operations(job: Job, inverse_gradient: bool) -> float:
    """Floating-point operations of a rank and step: two per weight and pair forward, four more backward."""
    plain = 6.0 * job.dense * job.pairs
    if not inverse_gradient:
        return plain
    return plain + 6.0 * job.dense * job.unlabeled + 2.0 * job.dense * job.pairs * job.candidates


def epoch_steps(rows: int, batch: int, test_share: float) -> tuple[int, int]:
    """Plain and inverse-gradient steps of an `ig` epoch: phase 1 on training-train, phase 2 on training-test."""
    test = round(rows * test_share)
    return -(-(rows - test) // batch), -(-test // batch)


def _cells(job: Job, spreads: Sequence[Spread], rank: int, pairs: int) -> tuple[float, float, float]:
    asked = sum(spread.asked(rank, job.ranks, pairs) for spread in spreads)
    asked_bytes = sum(spread.asked(rank, job.ranks, pairs) * spread.width * FLOAT for spread in spreads)
    answered = sum(spread.answered(rank, job.ranks, pairs) * spread.width * FLOAT for spread in spreads)
    return asked, asked_bytes, answered


def _counts(job: Job, groups: int) -> int:
    return groups * ID * (job.ranks - 1)


def _dense_message(job: Job) -> int:
    # The loss sum and the row count travel with the gradient.
    return (job.dense + 2) * FLOAT


def _rows(job: Job, pairs: int) -> float:
    return 2 * pairs * job.columns * FLOAT


def _indices(pairs: int) -> float:
    return 3 * 8 * 2 * pairs * ID
