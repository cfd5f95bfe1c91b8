"""Finds the owner and the local row of every row piece that pairs ask for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from invdist.embeddings.kernels import kernels
from invdist.embeddings.tables import Layout


class Pairs(NamedTuple):
    """User-item pairs: two index tensors of the same length. To look rows up, the lengths may differ."""

    user: Tensor
    item: Tensor


class _Place(NamedTuple):
    """Where the rows of one table are."""

    block: int
    """Rows of a row shard; 0: the table is not cut by rows."""
    bases: Tensor
    """What is added to an id: by owner for a table cut by rows, by piece otherwise."""
    multiplier: int = 1
    rows: int = 0


class RowLocator:
    """Gives each row piece a key, `owner * stride + local row`: sorted by key, pieces are in order of owner."""

    def __init__(self, layout: Layout, size: int, device: torch.device, rank: int = 0) -> None:
        self.pieces = layout.tables[0].columns // layout.width
        """Pieces of a row: column shards, or 1."""
        self.row_bits = max(shard.base + shard.rows for shard in layout.shards).bit_length()
        """Bits of a key that have the local row; the bits above have its owner."""
        self.stride = 1 << self.row_bits
        """More than the local rows of any rank."""
        self.edges = torch.arange(size + 1, device=device) * self.stride
        """The first key of each owner, and the end."""
        self._replicated = [size > 1 and table.name in layout.replicated for table in layout.tables]
        self.kinds = sorted(set(self._replicated))
        """Whether tables are replicated, on several ranks: [False], [True], or [False, True] if only some are."""
        here = [shard.base for shard in layout.on(rank) if shard.table in layout.replicated]
        self.first_copy = min(here, default=0)
        """The first local row of replicated tables, which are one after the other: ranks count their rows from here."""
        self._places = []
        for table, replicated in zip(layout.tables, self._replicated, strict=True):
            shards = layout.of(table.name)
            if layout.sharding[table.name] == "row_wise" and size > 1:
                by_rank = torch.zeros(size, dtype=torch.int64)
                for shard in shards:
                    by_rank[shard.rank] = shard.rank * self.stride + shard.base - shard.row
                spread = layout.multipliers.get(table.name, 1)
                self._places.append(_Place(shards[0].rows, by_rank.to(device), spread, table.rows))
            else:
                held = [shard for shard in shards if shard.rank == rank] if replicated else shards
                bases = [shard.base + (0 if replicated else shard.rank * self.stride) for shard in held]
                self._places.append(_Place(0, torch.tensor(bases, device=device)))

    def __call__(self, pairs: Pairs, *, replicated: bool | None = None) -> Tensor:
        """The key of every piece: `[2n * pieces]`, users first, the pieces of a row side by side.

        With `replicated` only those of tables that are, or that are not. The key of a replicated row is its local row
        on this rank.
        """
        keys = []
        compiled = kernels() if pairs.user.device.type == "cpu" else None
        for ids, kind, (block, bases, multiplier, rows) in zip(pairs, self._replicated, self._places, strict=True):
            if replicated not in (None, kind):
                continue
            if block and compiled is not None:
                keys.append(compiled.locate(ids, block, bases, multiplier, rows))
            elif block:
                if multiplier != 1:
                    ids = torch.remainder(ids * multiplier, rows)
                keys.append(ids + bases.index_select(0, torch.div(ids, block, rounding_mode="floor")))
            else:
                keys.append(ids + bases if len(bases) == 1 else (ids.unsqueeze(1) + bases).view(-1))
        return torch.cat(keys) if len(keys) > 1 else keys[0]
