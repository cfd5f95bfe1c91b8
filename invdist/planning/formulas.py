"""What a step of this engine costs, as arithmetic: bytes sent, memory, operations. Nothing here is measured.

Symbols:

    G          ranks, one GPU each
    n          labeled pairs of a rank and step: batch / G, rounded up
    u          unlabeled pairs of a rank in an inverse-gradient step: rate * n
    W          columns of a table row (dim for GMF, 5 * dim for NeuMF), without exposure vectors
    P          dense parameters
    C          candidates
    U, V       the unlabeled and the training-test batch
    piece      a table row, or one column shard of it, as it is sent: 8 bytes of id, 4 bytes a column

A pair needs one piece of each column shard of each table. Pieces that its own rank holds are not sent. A piece that
several pairs of a rank need is sent once; the formulas count it for each of them, which is an upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from invdist.planning.job import DOUBLE, FLOAT, ID, OPTIMIZER_FLOATS, Job

PLAIN_OPERATORS, IG_OPERATORS = 150, 475
"""Operators that one step launches, counted on NeuMF with one rank; GMF launches fewer."""


@dataclass(frozen=True, kw_only=True)
class TableSpread:
    """How one table is spread over the ranks."""

    sharding: str
    columns: int
    owners: tuple[int, ...] = (0,)
    """The owner of each piece of a row, for table-wise and column-wise tables."""

    def asked(self, rank: int, ranks: int, pairs: int) -> float:
        """Pieces that the `pairs` of a rank need from other ranks (row-wise: expected, for evenly spread ids)."""
        if self.sharding == "row_wise":
            return pairs * (ranks - 1) / ranks
        if self.sharding == "data_parallel":
            return pairs * (ranks - 1)  # every other rank gets the gradients: it must make the same update
        return pairs * sum(owner != rank for owner in self.owners)

    def answered(self, rank: int, ranks: int, pairs: int) -> float:
        """Pieces that the other ranks, with `pairs` each, need from this one."""
        if self.sharding == "data_parallel":
            return 0.0
        if self.sharding == "row_wise":
            return self.asked(rank, ranks, pairs)
        return pairs * (ranks - 1) * sum(owner == rank for owner in self.owners)

    @property
    def piece_bytes(self) -> int:
        """Bytes of the values of a piece."""
        return (self.columns // len(self.owners) if self.sharding == "column_wise" else self.columns) * FLOAT


@dataclass(frozen=True)
class StepTraffic:
    """Bytes that a rank sends in one step, by what they are, and how many collectives carry them."""

    ids: float = 0
    """Ids to their owners, and how many of them."""
    rows: float = 0
    vectors: float = 0
    """Exposure vectors of the same rows."""
    gradients: float = 0
    deltas: float = 0
    losses: float = 0
    """The all-reduce of candidate losses."""
    dense: float = 0
    """The all-reduces of dense gradients."""
    all_to_alls: int = 0
    all_gathers: int = 0
    """Of gradients of replicated tables."""
    all_reduces: int = 0

    @property
    def total(self) -> float:
        """All bytes."""
        return self.ids + self.rows + self.vectors + self.gradients + self.deltas + self.losses + self.dense

    @property
    def collectives(self) -> int:
        """All collectives."""
        return self.all_to_alls + self.all_gathers + self.all_reduces


def all_reduce_bytes(size: float, ranks: int) -> float:
    """Bytes a rank sends in a ring all-reduce of `size` bytes: everything twice, less its own share."""
    return 2 * size * (ranks - 1) / ranks


def plain_traffic(job: Job, spreads: Sequence[TableSpread], rank: int = 0) -> StepTraffic:
    """A log-loss step: ids out, rows in, gradients back, one dense all-reduce."""
    if job.gpus == 1:
        return StepTraffic()
    cut, replicated = _kinds(spreads)
    asked, asked_bytes, answered_bytes = _pieces(job, spreads, rank, job.pairs)
    return StepTraffic(
        ids=asked * ID + _counts(job, groups=cut + replicated),
        rows=answered_bytes,
        vectors=_vectors(job, spreads, rank, job.pairs),
        gradients=asked_bytes,
        dense=all_reduce_bytes(_dense_message(job), job.gpus),
        all_to_alls=2 + 2 * cut + (job.exposure_dim > 0),
        all_gathers=int(replicated),
        all_reduces=1,
    )


def ig_traffic(job: Job, spreads: Sequence[TableSpread], rank: int = 0) -> StepTraffic:
    """An inverse-gradient step: ids and rows of U and V together, gradients of U, deltas of V, candidate losses,
    gradients of V, two dense all-reduces."""
    if job.gpus == 1:
        return StepTraffic()
    cut, replicated = _kinds(spreads)
    asked_V, asked_bytes_V, answered_bytes_V = _pieces(job, spreads, rank, job.pairs)
    asked_U, asked_bytes_U, answered_bytes_U = _pieces(job, spreads, rank, job.unlabeled)
    # Beside the losses: row counts, the annotation mean, two norms, and each rank's last choice and checksum.
    figures = job.candidates + 5 + 2 * job.gpus
    return StepTraffic(
        ids=(asked_V + asked_U) * ID + _counts(job, groups=2 * (cut + replicated)),
        rows=answered_bytes_V + answered_bytes_U,
        vectors=_vectors(job, spreads, rank, job.pairs + job.unlabeled),
        gradients=asked_bytes_V + asked_bytes_U,
        deltas=answered_bytes_V,
        losses=all_reduce_bytes(figures * DOUBLE, job.gpus),
        dense=2 * all_reduce_bytes(_dense_message(job), job.gpus),
        all_to_alls=2 + 4 * cut + (job.exposure_dim > 0),
        all_gathers=2 * replicated,
        all_reduces=3,
    )


def busiest(job: Job, spreads: Sequence[TableSpread], inverse_gradient: bool) -> StepTraffic:
    """The traffic of the rank that sends most: any rank if tables are row-wise, the owner of a table otherwise."""
    kind = ig_traffic if inverse_gradient else plain_traffic
    ranks = {owner for spread in spreads for owner in spread.owners} | {job.gpus - 1}
    return max((kind(job, spreads, rank) for rank in ranks), key=lambda traffic: traffic.total)


def plain_working_bytes(job: Job) -> float:
    """Memory of a log-loss step beside tables and dense state, if nothing is freed before its end.

    Ten buffers of the fetched rows: sent, received, in order; their gradient, in sending order, received, summed,
    scaled; and the two moments of the unique rows. Exposure vectors: sent, received, in order. Eight index arrays for
    each of three steps (ids are exchanged two steps ahead). Saved values of the tower and their gradients.
    """
    return 10 * _rows(job, job.pairs) + _indices(job.pairs) + 2 * _saved(job, job.pairs) + _frozen(job, job.pairs)


def ig_added_bytes(job: Job) -> float:
    """Memory that an inverse-gradient step needs on top of a plain one.

    For U: eight buffers as above, and three of its update. For V: deltas sent, received and in order, the committed
    rows, and the rows, tower values and logits of all candidates, which are tried as one batch. Of the dense
    parameters: the update, a copy, and the candidates. No term grows with the tables.
    """
    of_U = 11 * _rows(job, job.unlabeled) + _indices(job.unlabeled) + 2 * _saved(job, job.unlabeled)
    of_U += _frozen(job, job.unlabeled)
    of_candidate = _rows(job, job.pairs) + _saved(job, job.pairs) + (job.pairs + job.backbone.dense) * FLOAT
    of_V = 4 * _rows(job, job.pairs) + job.candidates * of_candidate
    return of_U + of_V + 2 * job.backbone.dense * FLOAT


def working_bytes(job: Job) -> float:
    """Memory of an inverse-gradient step beside the tables: dense state, a plain step's share and its own."""
    return dense_bytes(job) + plain_working_bytes(job) + ig_added_bytes(job)


def dense_bytes(job: Job) -> float:
    """Dense parameters with gradient and optimizer state."""
    state = 1.0 if job.optimizer == "rowwise_adagrad" else OPTIMIZER_FLOATS[job.optimizer]
    return job.backbone.dense * FLOAT * (2 + state)


def vectors_bytes(job: Job) -> float:
    """Exposure vectors on the fullest device: row-wise and without optimizer state."""
    rows = -(-job.users // job.gpus) + -(-job.items // job.gpus)
    return rows * job.backbone.frozen * FLOAT


def memory_traffic(job: Job, inverse_gradient: bool) -> float:
    """Bytes a step moves in a device's memory: every buffer written and read once, unique rows and their state
    read and written."""
    moved = 2 * plain_working_bytes(job) + 2 * (1 + OPTIMIZER_FLOATS[job.optimizer]) * _rows(job, job.pairs)
    if inverse_gradient:
        moved += 2 * ig_added_bytes(job) + 3 * _rows(job, job.unlabeled)
    return moved


def table_traffic(job: Job, inverse_gradient: bool) -> float:
    """Bytes of tables and optimizer state that a step reads and writes: rows that are pulled, rows that are moved.

    The part of `memory_traffic` that crosses the link to the host if tables are in unified memory.
    """
    moved = (1 + 2 * (1 + OPTIMIZER_FLOATS[job.optimizer])) * _rows(job, job.pairs)
    return moved + (3 * _rows(job, job.unlabeled) if inverse_gradient else 0)


def operations(job: Job, inverse_gradient: bool) -> float:
    """Floating-point operations of a rank and step: two per weight and pair forward, four more backward."""
    plain = 6.0 * job.backbone.dense * job.pairs
    if not inverse_gradient:
        return plain
    return plain + 6.0 * job.backbone.dense * job.unlabeled + 2.0 * job.backbone.dense * job.pairs * job.candidates


def epoch_steps(rows: int, batch: int, test_share: float) -> tuple[int, int]:
    """Plain and inverse-gradient steps of an `ig` epoch: phase 1 on training-train, phase 2 on training-test."""
    test = round(rows * test_share)
    return -(-(rows - test) // batch), -(-test // batch)


def _kinds(spreads: Sequence[TableSpread]) -> tuple[bool, bool]:
    """Whether there are tables that are cut, and tables that are replicated."""
    replicated = {spread.sharding == "data_parallel" for spread in spreads}
    return False in replicated, True in replicated


def _pieces(job: Job, spreads: Sequence[TableSpread], rank: int, pairs: int) -> tuple[float, float, float]:
    """Pieces that a rank asks for, their bytes, and the bytes of those that it sends to others."""
    asked = [(spread.asked(rank, job.gpus, pairs), spread.piece_bytes) for spread in spreads]
    answered = sum(spread.answered(rank, job.gpus, pairs) * spread.piece_bytes for spread in spreads)
    return sum(count for count, _ in asked), sum(count * size for count, size in asked), answered


def _vectors(job: Job, spreads: Sequence[TableSpread], rank: int, pairs: int) -> float:
    """Bytes of the exposure vectors that a rank sends to others."""
    return sum(spread.answered(rank, job.gpus, pairs) for spread in spreads) * job.backbone.frozen * FLOAT


def _counts(job: Job, groups: int) -> int:
    return groups * ID * (job.gpus - 1)


def _dense_message(job: Job) -> int:
    # The loss sum and the row count are sent with the gradient.
    return (job.backbone.dense + 2) * FLOAT


def _rows(job: Job, pairs: int) -> float:
    return 2 * pairs * job.backbone.columns * FLOAT


def _frozen(job: Job, pairs: int) -> float:
    return 3 * 2 * pairs * job.backbone.frozen * FLOAT


def _saved(job: Job, pairs: int) -> float:
    return pairs * job.backbone.saved * FLOAT


def _indices(pairs: int) -> float:
    return 3 * 8 * 2 * pairs * ID
