"""What ranks that share memory ask of each other, with kernels (requests.c).

Where ranks read each other's memory, a rank need not sum its gradients before it sends them: it shows them as they are,
and its requests say which of them belong to which row. The owner sorts the requests of all ranks by row, and sums the
gradients once: nobody sorts before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from invdist.embeddings.row_moves import UniqueRows
from invdist.runtime.native import addresses, compiled

_SOURCE = Path(__file__).with_name("requests.c")
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_HEAD = 2  # HEAD in requests.c
_REPEATED = 2  # rows are repeated if there are so many occurrences of each, as a mean


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
        def function(name: str, *arguments: Any, gives: Any = None) -> Any:
            found = getattr(library, name)
            found.argtypes, found.restype = arguments, gives
            return found

        p, i = _POINTER, _INT
        self._about_distinct = function("about_distinct", p, i, i, p, gives=ctypes.c_double)
        self._pack = function("pack_requests", p, p, i, i, i, p, p, p)
        self._join = function("join_requests", p, i, i, i, p, p)
        self._answer_places = function("answer_places", p, i, i, p, i, p)
        self._pack_deltas = function("pack_deltas", p, p, i, p, i, p, p, p)
        self._join_deltas = function("join_deltas", p, p, p, i, p, i, p)

    def repeat(self, keys: Tensor) -> bool:
        """Whether about half of the keys or more are repetitions, without sorting them."""
        bits = max(6, (4 * len(keys)).bit_length())
        words = torch.zeros(1 << (bits - 6), dtype=torch.int64)
        return 0 < _REPEATED * self._about_distinct(keys.data_ptr(), len(keys), bits, words.data_ptr()) <= len(keys)

    def pack(
        self, keys: Sequence[Tensor], owners: int, row_bits: int, buffer: Callable[[int], Tensor]
    ) -> tuple[Tensor, list[int], list[list[int]]]:
        """The messages to all owners in memory of `buffer(words)`, their sizes, and the rows in them by group.

        The keys of a group are those of its pieces or, if their gradients are shown summed, the distinct ones.
        """
        groups = len(keys)
        counts = [len(of_group) for of_group in keys]
        out, sizes, asked = (
            buffer(2 * (sum(counts) + groups * owners) + 2),
            (_INT * owners)(),
            (_INT * (owners * groups))(),
        )
        self._pack(addresses(keys), (_INT * groups)(*counts), groups, owners, row_bits, sizes, asked, out.data_ptr())
        return out, list(sizes), [asked[group::groups] for group in range(groups)]

    def requests(self, messages: Sequence[Tensor], groups: int) -> list[Requests]:
        """What the messages of all ranks ask for, by group."""
        heads = [message[: _HEAD * groups].tolist() for message in messages]
        places, found = addresses(messages), []
        for group in range(groups):
            received = [of_rank[_HEAD * group] for of_rank in heads]
            rows, gradients = torch.empty((2, sum(received)), dtype=torch.int64)
            self._join(places, len(messages), groups, group, rows.data_ptr(), gradients.data_ptr())
            unique = UniqueRows.of(rows)
            shown = UniqueRows(unique.rows, gradients.index_select(0, unique.order), unique.starts)
            found.append(Requests(unique, shown, received))
        return found

    def answer_places(self, keys: Tensor, row_bits: int, asked: Sequence[int]) -> Tensor:
        """The place of each of the keys that were packed, `asked` of each owner, in the answers to all of them."""
        out, owners = torch.empty_like(keys), len(asked)
        self._answer_places(keys.data_ptr(), len(keys), row_bits, (_INT * owners)(*asked), owners, out.data_ptr())
        return out

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

    def join_deltas(self, answers: Sequence[Tensor], rows: Sequence[int], place: Tensor) -> Tensor:
        """The place of each piece of a batch among the `rows` deltas of all owners, or -1, from their answers.

        `place` is where the answers, one after the other, have each piece.
        """
        owners, joined, out = len(answers), torch.cat(list(answers)), torch.empty_like(place)
        edges = (_INT * (owners + 1))(*accumulate((len(answer) for answer in answers), initial=0))
        given = (edges, (_INT * owners)(*rows), owners, place.data_ptr(), len(place), out.data_ptr())
        self._join_deltas(joined.data_ptr(), *given)
        return out


@cache
def request_kernels() -> RequestKernels | None:
    """The kernels; None where there are none."""
    library = compiled(_SOURCE).library
    return None if library is None else RequestKernels(library)
