"""What ranks that share memory ask of each other, with kernels (requests.c).

Where ranks read each other's memory, a rank need not sum its gradients before it sends them: it shows them as they are,
and its requests say which of them belong to which row. The owner sums them once. Requests of each rank come in order
of row, so the owner merges them and sorts nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from invdist.embeddings.row_moves import UniqueRows
from invdist.runtime.native import compiled

_SOURCE = Path(__file__).with_name("requests.c")
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_HEAD = 3  # HEAD in requests.c


class Requests(NamedTuple):
    """What all ranks ask of this one in one group."""

    unique: UniqueRows
    """The distinct rows, and which of all requests, rank after rank, ask for each."""
    gradients: UniqueRows
    """The same rows, and which rows of the gradients that ranks show belong to each."""
    received: list[int]
    """Requests of each rank."""


class RequestKernels:
    """Keys are int64; see `RowLocator`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        p, i = _POINTER, _INT
        self._pack, self._merge = library.pack_requests, library.merge_requests
        self._pack.argtypes, self._pack.restype = [p, p, p, p, p, i, i, i, p, p, p], None
        self._merge.argtypes, self._merge.restype = [p, p, i, i, i, p, p, p, p, p], i
        self._pack_deltas, self._join_deltas = library.pack_deltas, library.join_deltas
        self._pack_deltas.argtypes, self._pack_deltas.restype = [p, p, i, p, i, p, p, p], None
        self._join_deltas.argtypes, self._join_deltas.restype = [p, p, p, i, p, p, i, p], None

    def pack(
        self,
        columns: Sequence[UniqueRows],
        summed: Sequence[bool],
        owners: int,
        row_bits: int,
        buffer: Callable[[int], Tensor],
    ) -> tuple[Tensor, list[int], list[list[int]]]:
        """The messages to all owners in memory of `buffer(words)`, their sizes, and the rows in them by group.

        Of groups that are `summed`, gradients are shown summed by distinct row.
        """
        groups = len(columns)
        distinct = (_INT * groups)(*(len(column.rows) for column in columns))
        occurrences = (_INT * groups)(*(len(column.order) for column in columns))
        of_groups = zip(distinct, occurrences, summed, strict=True)
        words = sum(2 * d + (d if s else o) for d, o, s in of_groups) + _HEAD * groups * owners
        out, sizes, asked = buffer(words), (_INT * owners)(), (_INT * (owners * groups))()
        starts = [None if s else column.starts for column, s in zip(columns, summed, strict=True)]
        keys, order = [column.rows for column in columns], [column.order for column in columns]
        lists = (_places(keys), _places(starts), _places(order), distinct, occurrences)
        self._pack(*lists, groups, owners, row_bits, sizes, asked, out.data_ptr())
        return out, list(sizes), [asked[group::groups] for group in range(groups)]

    def merge(self, messages: Sequence[Tensor], groups: int) -> list[Requests]:
        """What the messages of all ranks ask for, by group."""
        ranks, head = len(messages), _HEAD * groups
        heads = [message[:head].tolist() for message in messages]
        sizes = (_INT * (head * ranks))(*(size for of_rank in heads for size in of_rank))
        places, found = _places(messages), []
        for group in range(groups):
            received = [of_rank[_HEAD * group] for of_rank in heads]
            n, rows = sum(received), sum(of_rank[_HEAD * group + 1] for of_rank in heads)
            space = torch.empty(4 * n + rows + 2, dtype=torch.int64)
            distinct, starts, row_starts, order, row_order = space.split([n, n, n, n + 1, rows + 1])
            lists = [each.data_ptr() for each in (distinct, order, starts, row_order, row_starts)]
            count = self._merge(places, sizes, ranks, groups, group, *lists)
            unique = UniqueRows(distinct[:count], order[:n], starts[:count])
            found.append(Requests(unique, UniqueRows(unique.rows, row_order[:rows], row_starts[:count]), received))
        return found

    def pack_deltas(
        self, places: Tensor, received: Sequence[int], values: Tensor, index: Tensor, rows: Tensor
    ) -> list[int]:
        """Packs the rows of `values` that are asked for into `rows`. Gives how many there are for each rank.

        `places` has those of all requests, `received` by each rank, in `values`, or -1. `index` gets the place of each
        among the rows for its rank, or -1.
        """
        ranks, sizes = len(received), (_INT * len(received))()
        given = (places.data_ptr(), (_INT * ranks)(*received), ranks, values.data_ptr(), values.shape[1])
        self._pack_deltas(*given, index.data_ptr(), rows.data_ptr(), sizes)
        return list(sizes)

    def join_deltas(self, answers: Sequence[Tensor], rows: Sequence[int], asked: UniqueRows) -> Tensor:
        """The place of each piece of a batch among the `rows` deltas of all owners, or -1, from their answers."""
        owners, out = len(answers), torch.empty_like(asked.order)
        sizes = (_INT * owners)(*(len(answer) for answer in answers)), (_INT * owners)(*rows)
        segments = (asked.order.data_ptr(), asked.starts.data_ptr(), len(asked.order))
        self._join_deltas(_places(answers), *sizes, owners, *segments, out.data_ptr())
        return out


def _places(tensors: Sequence[Tensor | None]) -> Any:
    return (_POINTER * len(tensors))(*(None if tensor is None else tensor.data_ptr() for tensor in tensors))


@cache
def request_kernels() -> RequestKernels | None:
    """The kernels; None where there are none."""
    library = compiled(_SOURCE).library
    return None if library is None else RequestKernels(library)
