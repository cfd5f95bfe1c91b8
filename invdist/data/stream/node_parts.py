"""One request per node and block: the ranks of a node share what a reader on another node sends."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

_KEPT_BLOCKS = 256
"""More than the ranks of a node ask for ahead; a block asked for after that is fetched again."""


class NodeParts:
    """A Ray actor beside the ranks of one node. What it gives depends on its arguments alone.

    The first rank that asks for a block makes it ask the reader for the parts of all ranks of the node. The reader's
    answer is one object, which travels once and is in the memory of the node until each rank has its part.
    """

    def __init__(self, readers: Sequence[Any], ranks: Sequence[int], world_size: int) -> None:
        self._readers, self._ranks, self._world_size = readers, list(ranks), world_size
        self._fetched: OrderedDict[tuple[int, int], tuple[Any, set[int]]] = OrderedDict()

    async def part(self, reader: int, epoch: int, block: int, rank: int) -> dict[str, np.ndarray]:
        """`BlockMaker.part` of a rank of this node, from reader number `reader`."""
        if (epoch, block) not in self._fetched:
            fetching = self._readers[reader].parts.remote(epoch, block, self._ranks, self._world_size)
            self._fetched[epoch, block] = fetching, set(self._ranks)
            if len(self._fetched) > _KEPT_BLOCKS:
                self._fetched.popitem(last=False)
        fetching, without = self._fetched[epoch, block]
        parts = await fetching
        without.discard(rank)
        if not without:
            self._fetched.pop((epoch, block), None)
        return parts[rank]
