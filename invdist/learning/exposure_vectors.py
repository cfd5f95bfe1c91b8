"""Vectors of users and items from exposures alone: who was shown what tells who and what are alike. No label is read.

The vectors are the leading singular vectors of the normalised exposure matrix

    A[u, i] = 1 / sqrt((shown(u) + 5) * (shown(i) + 5))    for every exposure (u, i), else 0

scaled by the singular values, less where chance alone would give those (`chance`). Who was shown little
is drawn to the average: the 5 above are exposures by popularity, added to those of each id that has any. A model reads
the leading columns, brought to length one. They are found by subspace iteration: a block of random item vectors Q is
multiplied by A and its transpose in turn, and made orthonormal after each product. A product is a sum over exposures,
so each exposure costs one row pulled and one row pushed through the same exchange as a training step:

    to users    Y[u] = sum of A[u, i] * Q[i]        pull the rows of items, push them to the owners of users
    to items    Q[i] = sum of A[u, i] * Y[u]        the same with users and items swapped

There is no learning rate, the order of exposures has no effect, and any number of ranks gives the same vectors up to
rounding. Columns of a row: `dim + _EXTRA` of the iterated block, then the number of exposures, the numbers of labels,
of all and of those that train now (how many, not which), and padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from invdist.embeddings.exchange import Exchange, Pairs
from invdist.embeddings.store import EmbeddingStore
from invdist.learning.chance import column_weights, histogram, shares, without_chance

Table = Literal["user", "item"]
_TABLES: tuple[Table, ...] = ("user", "item")
Shrinking = Literal["smooth", "step"] | None
"""`smooth`: by `column_weights`. `step`, for models that were trained so: by `without_chance` if that leaves more than
half of the columns, else not. None: not at all."""
Batch = tuple[np.ndarray, np.ndarray]
"""Users and items of exposures."""
PADDING = 4
"""Columns after the block: exposures, labels, those that train now, and an unused one: FBGEMM needs a multiple of 4."""
_EXTRA = 64
"""Columns beyond `dim` during the iteration: the leading ones then converge in a few products."""
_SMOOTHING = 5.0
_BLOCK_ROWS = 1 << 13
"""Rows that are copied to float64 at once: few, so that the copies do not add to the memory of the tables."""


def iteration_columns(dim: int) -> int:
    """Columns of the tables that `SubspaceIteration` works in."""
    return dim + _EXTRA + PADDING


class SubspaceIteration:
    """The iteration on one rank, in step with the others. `store` has row-wise tables of `iteration_columns(dim)`."""

    def __init__(self, store: EmbeddingStore, dim: int) -> None:
        self.store, self.dim = store, dim
        self._width = dim + _EXTRA
        self._last_weights: tuple[Tensor, Shrinking, Tensor] | None = None
        """Singular values, how they were shrunk, and the weights that came out: the same for users and items."""

    @torch.no_grad()
    def start(
        self, counts: EmbeddingStore, seed: int, known: Callable[[str, Tensor, int, int], None] | None = None
    ) -> None:
        """Draws the first block. `counts` has the columns after it (`count_pairs`).

        `known(table, rows, first, multiplier)` writes vectors that are nearly right into `rows` (`[n, dim]`), those of
        a table from the place `first` on (`Layout.multipliers`).
        """
        self.store.init(seed, 1.0)
        self.store.local_rows[:, self._width :] = counts.local_rows
        for table in _TABLES:
            if known is not None:
                for shard in self.store.layout.on(self.store.comm.rank):
                    if shard.table == table:
                        multiplier = self.store.layout.multipliers.get(table, 1)
                        known(table, self._local(table)[:, : self.dim], shard.row, multiplier)
                self._scale_known(table)
        self.orthonormalise("item")

    def _scale_known(self, table: Table) -> None:
        """Brings the leading columns to the size of the random ones, which would drown them in rounding otherwise."""
        square = self._gram(table).diagonal()
        wanted = square[self.dim :].mean()
        scale = torch.where(square[: self.dim] > 0, (wanted / square[: self.dim]).sqrt(), 0.0)
        self._block(table)[:, : self.dim] *= scale.float()

    @torch.no_grad()
    def product(self, target: Table, batches: Iterable[Batch], *, last: bool = False) -> None:
        """Replaces the block of `target` by the product of A with the block of the other table.

        The result is made orthonormal, except for the `last` product.
        """
        source: Table = "item" if target == "user" else "user"
        self._block(source).mul_(self._weight(source))
        self._block(target).zero_()
        for user, item, _ in _exchanges(self.store, batches):
            pulled, pushed = (item, user) if target == "user" else (user, item)
            rows = self.store.pull(pulled)[0]
            rows[:, self._width :] = 0.0
            self.store.add(self.store.push(pushed.finish().routes[0], rows)(), 1.0)
        self._block(source).div_(self._weight(source))
        self._block(target).mul_(self._weight(target))
        if not last:
            self.orthonormalise(target)

    @torch.no_grad()
    def vectors(self, table: str, *, shrink: Shrinking) -> Tensor:
        """After a last product to users, this rank's rows of a table: `[rows, dim + 4]`. Every rank calls it.

        Columns are the vector (zero without exposures), `log(1 + exposures)`, and the other counts. With `shrink`,
        columns that chance explains weigh less, and each id with exposures has a few average ones more.
        """
        square, rotation = torch.linalg.eigh(self._gram("user"))
        square, rotation = square.flip(0)[: self.dim], rotation.flip(1)[:, : self.dim]
        singular = square.clamp(min=0).sqrt()
        # Eigenvectors are unique up to their sign: the largest entry is positive.
        rotation = rotation * rotation.gather(0, rotation.abs().argmax(0, keepdim=True)).sign()
        if table == "item":  # users already carry the singular values
            rotation = rotation * singular
        if shrink is not None:
            rotation = rotation * (self._weights(singular, shrink) / singular.clamp(min=1e-12))
        local = self._local(table)
        found = local.new_zeros((len(local), self.dim + PADDING))
        for part, values in zip(found.split(_BLOCK_ROWS), local.split(_BLOCK_ROWS), strict=True):
            rows = values[:, : self._width] @ rotation.to(values.dtype)
            part[:, : self.dim] = rows * (values[:, self._width, None] > 0)
            part[:, self.dim] = torch.log1p(values[:, self._width])
            part[:, self.dim + 1 : self.dim + 3] = values[:, self._width + 1 : self._width + 3]
        if shrink is not None:
            self._add_average(table, found[:, : self.dim])
        return found

    def _add_average(self, table: str, vectors: Tensor) -> None:
        """Adds to each id with exposures as many average ones as the normalisation counts too many: `_SMOOTHING`."""
        weight, shown = self._weight(table)[:, 0], self._shown(table)
        total = torch.zeros(self.dim + 1, dtype=torch.float64, device=vectors.device)
        total[-1] = shown.sum()
        for part, scale in zip(vectors.split(_BLOCK_ROWS), weight.split(_BLOCK_ROWS), strict=True):
            total[:-1] += part.double().T @ scale.double().reciprocal()
        total = self.store.comm.all_reduce(total).wait()
        average = (_SMOOTHING * total[:-1] / total[-1].clamp(min=1)).to(vectors.dtype)
        vectors.addr_(weight * (shown > 0), average)

    def _weights(self, singular: Tensor, shrink: Literal["smooth", "step"]) -> Tensor:
        last = self._last_weights
        if last is None or last[1] != shrink or not torch.equal(last[0], singular):
            last = self._last_weights = (singular, shrink, self._new_weights(singular, shrink))
        return last[2]

    def _new_weights(self, singular: Tensor, shrink: Literal["smooth", "step"]) -> Tensor:
        shown = [(counts := self._shown(table))[counts > 0] for table in _TABLES]
        counted = torch.stack([histogram(counts / (counts + _SMOOTHING)) for counts in shown])
        counted = self.store.comm.all_reduce(counted).wait()
        exposures = self.store.comm.all_reduce(shown[0].sum()).wait()
        users, items = (shares(table) for table in counted)
        if shrink == "smooth":
            return column_weights(singular, users, items, float(exposures))
        found = without_chance(singular, users, items, float(exposures))
        return found if 2 * int((found > 0).sum()) > len(found) else singular

    def _local(self, table: str) -> Tensor:
        """This rank's rows of a table."""
        shards = [s for s in self.store.layout.on(self.store.comm.rank) if s.table == table]
        assert len(shards) <= 1, "row-wise tables"
        first = shards[0].base if shards else 0
        return self.store.local_rows[first : first + (shards[0].rows if shards else 0)]

    def _shown(self, table: str) -> Tensor:
        return self._local(table)[:, self._width].double()

    def _block(self, table: str) -> Tensor:
        return self._local(table)[:, : self._width]

    def _weight(self, table: str) -> Tensor:
        return (self._local(table)[:, self._width, None] + _SMOOTHING).rsqrt()

    def _gram(self, table: str) -> Tensor:
        """The inner products of the block's columns over the rows of all ranks, float64 `[width, width]`."""
        block = self._block(table)
        total = torch.zeros((self._width, self._width), dtype=torch.float64, device=block.device)
        for part in block.split(_BLOCK_ROWS):
            total += (wide := part.double()).T @ wide
        return self.store.comm.all_reduce(total).wait()

    def orthonormalise(self, table: str) -> None:
        """Cholesky QR: the block times the inverse of its Gram matrix's Cholesky factor."""
        gram = self._gram(table)
        # A table with fewer rows than columns has a singular Gram matrix; the jitter keeps the factor finite.
        jitter = torch.eye(len(gram), dtype=gram.dtype, device=gram.device) * (gram.trace() * 1e-10 + 1e-30)
        factor = torch.linalg.cholesky(gram + jitter)
        inverse = torch.linalg.solve_triangular(factor, torch.eye(len(gram)).to(gram), upper=False).T.float()
        for part in self._block(table).split(_BLOCK_ROWS):
            part.copy_(part @ inverse)


@torch.no_grad()
def count_pairs(
    store: EmbeddingStore, exposures: Iterable[Batch], labeled: Iterable[Batch], now: Iterable[Batch] = ()
) -> EmbeddingStore:
    """Counts the exposures and the labeled pairs of every user and item into `store`, which has `PADDING` columns.

    Of a data set that has set some labels aside, `now` are the labeled pairs without them.

    It has tables of its own, with the rows of the others: what travels for each pair is four numbers, not a vector.
    """
    store.local_rows.zero_()
    for column, batches in enumerate((exposures, labeled, now)):
        for user, item, count in _exchanges(store, batches):
            ones = store.local_rows.new_zeros((count, store.columns))
            ones[:, column] = 1.0
            for exchange in (user, item):
                store.add(store.push(exchange.finish().routes[0], ones)(), 1.0)
    return store


def _exchanges(store: EmbeddingStore, batches: Iterable[Batch]) -> Iterator[tuple[Exchange, Exchange, int]]:
    """The exchanges of each batch's users and of its items, and its size; begun one batch ahead of their use."""
    device = store.local_rows.device
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    following: tuple[Exchange, Exchange, int] | None = None
    for batch in batches:
        current = following
        user, item = (torch.from_numpy(ids).to(device) for ids in batch)
        exchanges = (store.exchange([Pairs(user, nothing)]), store.exchange([Pairs(nothing, item)]))
        following = (*exchanges, len(user))
        if current is not None:
            yield current
    if following is not None:
        yield following
