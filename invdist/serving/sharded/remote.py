"""A model and raw ids in many processes, used like those of one process.

What is asked for is made distinct, sent to the workers that have it, one call each, and put back in its order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from invdist.models.backbone import Backbone
from invdist.models.frozen import FrozenModel
from invdist.serving.raw_ids import UNKNOWN, RawIds, pc
from invdist.serving.sharded.ids import share_of
from invdist.serving.sharded.slices import SIDES, Cut, Side

_FETCHED_BYTES = 64 << 20
_MOST_PAIRS = 1 << 18


class Peers(Protocol):
    """All workers, by number."""

    def ask(self, worker: int, method: str, *arguments: Any) -> Callable[[], Any]:
        """Calls a method of a worker's slice; the result, when it is called, waits for the answer."""
        ...


class _Parcels(NamedTuple):
    """Distinct values, ordered by owner, and where each value that was asked for is among them."""

    values: Any
    ends: np.ndarray
    """Where the values of each worker end."""
    place: np.ndarray

    def of(self, worker: int) -> slice:
        """The values of a worker."""
        return slice(int(self.ends[worker - 1]) if worker else 0, int(self.ends[worker]))


def _parcels(values: pa.Array, owners: Callable[[pa.Array], np.ndarray], workers: int) -> _Parcels:
    encoded = values.dictionary_encode()
    distinct = encoded.dictionary
    owner = owners(distinct).astype(np.uint16)  # numpy sorts 16 bits by radix
    order = np.argsort(owner, kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    ends = np.cumsum(np.bincount(owner, minlength=workers))
    return _Parcels(distinct.take(pa.array(order)), ends, place[encoded.indices.to_numpy(zero_copy_only=False)])


class RemoteModel:
    """A `FrozenModel` whose rows are fetched for the pairs that it is called with."""

    def __init__(self, backbone: Backbone, cuts: Sequence[Cut], columns: int, peers: Peers) -> None:
        self.backbone, self._cuts, self.columns, self._peers = backbone, cuts, columns, peers

    @property
    def most_pairs(self) -> int:
        """Pairs whose rows may be fetched at once."""
        return max(1, min(_FETCHED_BYTES // (8 * self.columns), _MOST_PAIRS))

    def __call__(self, user: Tensor, item: Tensor) -> Tensor:
        """Logits of pairs of indices (int64)."""
        model, *pairs = self.of(user.numpy(), item.numpy())
        return model(*map(torch.from_numpy, pairs))

    def of(self, user: np.ndarray, item: np.ndarray) -> tuple[FrozenModel, np.ndarray, np.ndarray]:
        """A model in this process with the rows of some pairs only, and those pairs as indices into it."""
        (users, items), (user, item) = self.rows(user, item)
        return FrozenModel(users, items, self.backbone), user, item

    def rows(self, user: np.ndarray, item: np.ndarray) -> tuple[list[Tensor], list[np.ndarray]]:
        """The distinct rows of users and of items (`[n, columns]` each), and where the row of each index is."""
        workers = self._cuts[0].workers
        parcels = [
            _parcels(pa.array(indices), lambda distinct, cut=cut: cut.owners(distinct.to_numpy()), workers)
            for indices, cut in zip((user, item), self._cuts, strict=True)
        ]
        asked = [[p.values.to_numpy()[p.of(worker)] for p in parcels] for worker in range(workers)]
        answers = [
            (worker, self._peers.ask(worker, "rows_of_both", *wanted))
            for worker, wanted in enumerate(asked)
            if sum(map(len, wanted))
        ]
        rows = [torch.empty((len(p.values), self.columns)) for p in parcels]
        for worker, answer in answers:
            for target, parcel, found in zip(rows, parcels, answer(), strict=True):
                target.numpy()[parcel.of(worker)] = found
        return rows, [parcel.place for parcel in parcels]


class RemoteIds(RawIds):
    """`RawIds` that are divided among workers."""

    def __init__(self, side: Side, kind: pa.DataType, cut: Cut, peers: Peers) -> None:
        self._side, self._kind, self._cut, self._peers = side, kind, cut, peers
        assert side in SIDES

    def __len__(self) -> int:
        return self._cut.rows

    @property
    def type(self) -> pa.DataType:
        """int64 or string."""
        return self._kind

    def indices(self, ids: pa.Array) -> np.ndarray:
        """Indices (int64) of ids in the data set's type; `UNKNOWN` for nulls and ids it does not have."""
        valid = ids.is_valid().to_numpy(zero_copy_only=False)
        found = np.full(len(ids), UNKNOWN)
        if valid.any():
            given = ids if valid.all() else pc.drop_null(ids)
            answers, place = self._ask(given, lambda distinct: share_of(distinct, self._cut.workers), "indices")
            found[valid] = np.concatenate(answers)[place]
        return found

    def take(self, indices: np.ndarray) -> pa.Array:
        """The raw ids of indices."""
        if not len(indices):
            return pa.array([], self._kind)
        owners = self._cut.owners
        answers, place = self._ask(pa.array(indices), lambda distinct: owners(distinct.to_numpy()), "raw")
        return pa.concat_arrays(answers).take(pa.array(place))

    def _ask(
        self, values: pa.Array, owners: Callable[[pa.Array], np.ndarray], method: str
    ) -> tuple[list[Any], np.ndarray]:
        parcels = _parcels(values, owners, self._cut.workers)
        answers = []
        for worker in range(self._cut.workers):
            part = parcels.of(worker)
            if part.start < part.stop:
                # Taken, not sliced: a slice would be sent with all that it is a slice of.
                mine = parcels.values.take(pa.array(np.arange(part.start, part.stop)))
                answers.append(self._peers.ask(worker, method, self._side, mine))
        return [answer() for answer in answers], parcels.place
