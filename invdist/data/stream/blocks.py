"""Blocks of consecutive steps: what a reader makes at once, and what each rank gets of it."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from invdist.data import hashing
from invdist.data.dataset import Dataset
from invdist.data.schema import OBSERVED_SPLITS
from invdist.data.stream.observed import ObservedPairs
from invdist.data.stream.order import ShuffledRows
from invdist.data.stream.sampler import Sampler
from invdist.data.stream.sampler_parts import PartedSampler
from invdist.runtime.errors import UserError

_LOG = logging.getLogger(__name__)
_BLOCK_ROWS = 262_144
"""Labeled and unlabeled rows of a block together, unless one step alone has more."""
_KEPT_BLOCKS = 6
"""Ranks ask for the same block a few blocks apart; a block asked for later is made again."""
_AHEAD_BLOCKS = 128
"""Blocks that are made ahead by all readers together, at most, so that every reader has something to do."""
_MIX_BITS = 20


@dataclass(frozen=True, kw_only=True)
class UnlabeledSpec:
    """Where unlabeled rows come from."""

    source: str = "exposures"
    """`exposures`: unclear rows of the data set; `sampled`: pairs never observed in training; `mix`: both."""
    mix: float = 0.5
    """The share of exposures in a mix."""
    popularity: float = 0.0
    """Sampled items are drawn with a chance ~ count^popularity."""


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """Everything that determines what a stream gives."""

    path: str
    splits: tuple[str, ...] = ("train",)
    batch_size: int = 1024
    """Labeled rows of a step, summed over all ranks."""
    unlabeled_per_row: int = 0
    unlabeled: UnlabeledSpec = field(default_factory=UnlabeledSpec)
    seed: int = 0
    window_rows: int = 262_144

    @property
    def sampler_seed(self) -> int:
        """The seed of sampled pairs."""
        return hashing.key(self.seed, *self.splits)

    @property
    def samples(self) -> bool:
        """Whether pairs that were never observed are drawn."""
        return self.unlabeled_per_row > 0 and self.unlabeled.source != "exposures"


def rank_rows(rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """Which of a step's rows a rank takes: [low, high)."""
    return rows * rank // world_size, rows * (rank + 1) // world_size


class BlockMaker:
    """Makes blocks of a stream: a pure function of (spec, epoch, block), with the last few kept for other ranks."""

    def __init__(self, spec: StreamSpec, sampler_parts: Sequence[Any] = (), readers: int = 1) -> None:
        """`sampler_parts` are actors that hold the observed pairs; without them this process does, if it samples.

        `readers` is the number of block makers that share the blocks of the stream.
        """
        self.spec, self._sampler_parts, self.readers = spec, sampler_parts, max(1, readers)
        self.dataset = Dataset.open(spec.path, verify="fast")
        self._labeled = ShuffledRows(self.dataset, spec.splits, spec.seed, spec.window_rows)
        self.rows = self._labeled.rows
        self.steps = -(-self.rows // spec.batch_size)
        self.steps_per_block = max(1, _BLOCK_ROWS // (spec.batch_size * (1 + spec.unlabeled_per_row)))
        self.blocks = -(-self.steps // self.steps_per_block)
        self._block_rows = self.steps_per_block * spec.batch_size
        self._per_window = max(1, -(-spec.window_rows // self._block_rows))
        self.stripe = min(self._per_window, max(1, _AHEAD_BLOCKS // self.readers))
        """Consecutive blocks that one reader makes: those of a window, which it reads once, if they are few."""
        self._exposures: ShuffledRows | None = None
        self._sampler: Sampler | PartedSampler | None = None
        self._kept: OrderedDict[tuple[int, int], dict[str, np.ndarray]] = OrderedDict()
        if missing := missing_data(self.dataset, spec):
            raise UserError(f"{spec.path} has {missing}")

    def rows_of_step(self, step: int) -> int:
        """Labeled rows of a step over all ranks."""
        return min(self.spec.batch_size, self.rows - step * self.spec.batch_size)

    def reader_of(self, block: int) -> int:
        """Which reader makes a block: readers take turns, each with a stripe of blocks of one window."""
        if self._per_window == 1:
            return block % self.readers
        window, inside = divmod(block * self._block_rows, self.spec.window_rows)
        stripes = -(-self._per_window // self.stripe)
        return (window * stripes + inside // self._block_rows // self.stripe) % self.readers

    def part(self, epoch: int, block: int, rank: int, world_size: int) -> dict[str, np.ndarray]:
        """A rank's rows of a block: `user`, `item`, `label`, `replayed` if the data set has it, and `unlabeled_user`,
        `unlabeled_item` if asked for.
        """
        whole = self.block(epoch, block)
        if world_size == 1:
            return whole
        rows = len(whole["user"])
        chosen = []
        for start in range(0, rows, self.spec.batch_size):
            low, high = rank_rows(min(self.spec.batch_size, rows - start), rank, world_size)
            chosen.append((start + low, start + high))
        k = self.spec.unlabeled_per_row
        part = {}
        for name, column in whole.items():
            width = k if name.startswith("unlabeled") else 1
            part[name] = np.concatenate([column[low * width : high * width] for low, high in chosen])
        return part

    def parts(self, epoch: int, block: int, ranks: Sequence[int], world_size: int) -> dict[int, dict[str, np.ndarray]]:
        """The parts of several ranks, by rank."""
        return {rank: self.part(epoch, block, rank, world_size) for rank in ranks}

    def block(self, epoch: int, block: int) -> dict[str, np.ndarray]:
        """All rows of a block, in the global order."""
        kept = self._kept.get((epoch, block))
        if kept is None:
            kept = self._kept[epoch, block] = self._make(epoch, block)
            if len(self._kept) > max(_KEPT_BLOCKS, self.stripe + 2):
                self._kept.popitem(last=False)
        return kept

    def _make(self, epoch: int, block: int) -> dict[str, np.ndarray]:
        size = self.steps_per_block * self.spec.batch_size
        start = block * size
        rows = self._labeled.read(epoch, start, min(start + size, self.rows))
        k = self.spec.unlabeled_per_row
        if not k:
            return rows
        # Unlabeled rows are numbered through the whole run, over all epochs.
        first = (epoch * self.rows + start) * k
        position = np.arange(first, first + len(rows["user"]) * k, dtype=np.uint64)
        user, item = self._unlabeled(np.repeat(rows["user"], k), position)
        return {**rows, "unlabeled_user": user, "unlabeled_item": item}

    def _unlabeled(self, user: np.ndarray, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        spec = self.spec.unlabeled
        if spec.source == "sampled":
            sampled = self._get_sampler().sample(user, position)
            return sampled[0].astype(np.int32), sampled[1].astype(np.int32)
        if spec.source == "exposures":
            return self._walk(int(position[0]), int(position[-1]) + 1)
        # Position p is an exposure when floor(p * share) moves on: the share is exact at every position.
        share = round(spec.mix * (1 << _MIX_BITS))
        before = [int(p) * share >> _MIX_BITS for p in (position[0], int(position[-1]) + 1)]
        exact = (position % np.uint64(1 << _MIX_BITS)) * np.uint64(share)
        exposed = (exact + np.uint64(share)) >> np.uint64(_MIX_BITS) > exact >> np.uint64(_MIX_BITS)
        out_user, out_item = np.empty(len(user), np.int32), np.empty(len(user), np.int32)
        out_user[exposed], out_item[exposed] = self._walk(*before)
        drawn = ~exposed
        out_user[drawn], out_item[drawn] = self._get_sampler().sample(user[drawn], position[drawn])
        return out_user, out_item

    def _walk(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Exposures [start, stop) of an endless walk: one shuffled pass through the unclear rows after another."""
        if self._exposures is None:
            self._exposures = ShuffledRows(self.dataset, ("unclear",), self.spec.seed, self.spec.window_rows)
        total = self._exposures.rows
        pieces = []
        while start < stop:
            number, at = divmod(start, total)
            upto = min(total, at + stop - start)
            pieces.append(self._exposures.read(number, at, upto))
            start += upto - at
        user, item = (
            np.concatenate([piece[name] for piece in pieces]) if pieces else np.empty(0, np.int32)
            for name in ("user", "item")
        )
        return user, item

    def _get_sampler(self) -> Sampler | PartedSampler:
        if self._sampler is None:
            if self._sampler_parts:
                self._sampler = PartedSampler(self._sampler_parts, self.dataset.users, self.dataset.items)
            else:
                observed = ObservedPairs.of(self.dataset)
                self._sampler = Sampler(observed, self.spec.sampler_seed, self.spec.unlabeled.popularity)
            if self._sampler.saturated_users:
                _LOG.warning(
                    "%d users have observed every item; their sampled rows go to the next user who has not",
                    self._sampler.saturated_users,
                )
        return self._sampler


def missing_data(dataset: Dataset, spec: StreamSpec) -> str | None:
    """What the data set has, or lacks, that makes the stream impossible, to be read after "has"; None if nothing."""
    if not sum(dataset.rows[split] for split in spec.splits):
        return f"no rows in {' + '.join(spec.splits)}"
    if not spec.unlabeled_per_row:
        return None
    exposures = {"exposures": 1.0, "sampled": 0.0, "mix": spec.unlabeled.mix}[spec.unlabeled.source]
    if exposures > 0 and not dataset.rows["unclear"]:
        return "no unclear exposures to draw unlabeled rows from"
    # A pair is in one split only, so rows are pairs.
    observed = sum(dataset.rows[split] for split in OBSERVED_SPLITS)
    if exposures < 1 and observed >= dataset.users * dataset.items:
        return f"all {dataset.users} x {dataset.items} pairs observed in training, none is left to sample"
    return None
