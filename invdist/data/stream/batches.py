"""Batches of labeled rows with their unlabeled rows, for one rank.

The order is global: a function of (seed, splits, epoch). Step t of an epoch is rows [t*B, (t+1)*B) of it, and rank r of
W takes rows [n*r//W, n*(r+1)//W) of the step's n rows, with the unlabeled rows of those. So a run is the same at any
number of ranks, and can be resumed at any step, at any number of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from invdist.data.stream.blocks import BlockMaker, StreamSpec, UnlabeledSpec, rank_rows
from invdist.data.stream.node_parts import NodeParts
from invdist.data.stream.sampler_parts import SamplerPart

__all__ = ["Batch", "Readers", "Stream", "StreamSpec", "UnlabeledSpec", "ray_readers"]


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's part of a step: n labeled interactions, and k unlabeled ones for each."""

    user: torch.Tensor
    """int64 [n]"""
    item: torch.Tensor
    """int64 [n]"""
    label: torch.Tensor
    """float32 [n]"""
    unlabeled_user: torch.Tensor | None
    """int64 [n*k]; rows [i*k, (i+1)*k) belong to labeled row i"""
    unlabeled_item: torch.Tensor | None
    """int64 [n*k]"""
    global_rows: int
    """Labeled rows of the step over all ranks."""
    step: int
    replayed: torch.Tensor | None = None
    """float32 [n]: 1 for labels of earlier days that train again (`REPLAYED`), else 0; None: there are none."""

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        if device.type == "cpu":
            return self
        moved = {
            name: None if (value := getattr(self, name)) is None else value.to(device, non_blocking=True)
            for name in ("user", "item", "label", "unlabeled_user", "unlabeled_item", "replayed")
        }
        return replace(self, **moved)


class Stream:
    """The batches of one rank. `readers` are the actors of `ray_readers`; without them the rank reads for itself.

    At least `prefetch` blocks are fetched ahead, and of several readers as many as keep all of them at work. `pinned`
    batches go to a GPU without the host waiting for the copy.
    """

    def __init__(
        self,
        spec: StreamSpec,
        rank: int,
        world_size: int,
        readers: Sequence[Any] | None = None,
        prefetch: int = 2,
        pinned: bool = False,
    ) -> None:
        self.spec, self.rank, self.world_size, self._pinned = spec, rank, world_size, pinned
        self._readers = readers
        self._maker = BlockMaker(spec, readers=len(readers or ()))
        self._prefetch = max(prefetch, self._maker.stripe * len(readers) if readers and len(readers) > 1 else 0)
        self._asked: dict[tuple[int, int], Any] = {}  # this rank's parts on their way, by epoch and block
        self.rows = self._maker.rows
        """Labeled rows of an epoch over all ranks."""
        self.steps = self._maker.steps
        """Steps of an epoch, the same on every rank."""

    def epoch(self, epoch: int, start_step: int = 0, *, next_start: int | None = None) -> Iterator[Batch]:
        """The batches of an epoch from `start_step` on.

        If the next epoch is to be read from step `next_start` on, its first blocks are fetched while this one ends.
        """
        per_block = self._maker.steps_per_block
        first, following = start_step // per_block, None if next_start is None else next_start // per_block
        for block, part in zip(range(first, self._maker.blocks), self._parts(epoch, first, following)):
            begin = block * per_block
            yield from self._batches(part, range(begin, min(begin + per_block, self.steps)), start_step)

    def _parts(self, epoch: int, first: int, following: int | None) -> Iterator[dict[str, np.ndarray]]:
        """This rank's part of each block, fetched ahead from the readers."""
        blocks = self._maker.blocks
        if not self._readers:
            for block in range(first, blocks):
                yield self._maker.part(epoch, block, self.rank, self.world_size)
            return
        import ray

        places = [(epoch, block) for block in range(first, blocks)]
        places += [(epoch + 1, block) for block in (() if following is None else range(following, blocks))]
        self._asked = {place: part for place in places if (part := self._asked.get(place)) is not None}
        for number in range(blocks - first):
            for place in places[number : number + self._prefetch + 1]:
                if place not in self._asked:
                    self._asked[place] = self._ask(*place)
            yield ray.get(self._asked.pop(places[number]))

    def _ask(self, epoch: int, block: int) -> Any:
        """Asks for this rank's part of a block: the reader, or the actor that asks it for all ranks of this node."""
        assert self._readers
        number = self._maker.reader_of(block)
        if isinstance(self._readers, Readers) and (shared := self._readers.of_nodes.get(self.rank)):
            return shared.part.remote(number, epoch, block, self.rank)
        return self._readers[number].part.remote(epoch, block, self.rank, self.world_size)

    def _batches(self, part: dict[str, np.ndarray], steps: range, start_step: int) -> Iterator[Batch]:
        k = self.spec.unlabeled_per_row
        user, item, label = (self._tensor(part[name]) for name in ("user", "item", "label"))
        replayed = self._tensor(part["replayed"]) if "replayed" in part else None
        unlabeled = [self._tensor(part[name]) for name in ("unlabeled_user", "unlabeled_item")] if k else None
        at = 0
        for step in steps:
            rows = self._maker.rows_of_step(step)
            low, high = rank_rows(rows, self.rank, self.world_size)
            end = at + high - low
            if step >= start_step:
                yield Batch(
                    user[at:end],
                    item[at:end],
                    label[at:end],
                    unlabeled[0][at * k : end * k] if unlabeled else None,
                    unlabeled[1][at * k : end * k] if unlabeled else None,
                    rows,
                    step,
                    None if replayed is None else replayed[at:end],
                )
            at = end

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        """A column of a block: labels and marks (int8) as float32, ids as int64."""
        # astype copies: memory shared by Ray's object store is read-only, and torch would warn.
        tensor = torch.from_numpy(values.astype(np.float32 if values.dtype == np.int8 else np.int64))
        # Batches are slices of it: pinned once per block.
        return tensor.pin_memory() if self._pinned else tensor


class Readers(list[Any]):
    """The actors of `ray_readers`, and those that sample for them.

    Whoever uses readers keeps all of them: Ray ends an actor that only dead processes knew of, and a reader that dies
    would take the last handle of a part with it.
    """

    def __init__(
        self, readers: Iterable[Any] = (), parts: Sequence[Any] = (), of_nodes: Mapping[int, Any] | None = None
    ) -> None:
        super().__init__(readers)
        self.parts = parts
        self.of_nodes = of_nodes or {}
        """The `NodeParts` that a rank asks instead of the readers, by rank."""


def ray_readers(spec: StreamSpec, count: int, nodes: Sequence[str] = ()) -> Readers:
    """`count` Ray actors that read shards and sample; the rank's `Stream` takes them as `readers`.

    `nodes` has the node (Ray's id) of each rank. Readers are divided over these nodes, which see the data and get the
    blocks. Elsewhere, such as on a small head node, they run only if such a node is lost; without `nodes`, anywhere.
    Several readers that sample share the observed pairs: as many actors more hold a part of them each. If there are
    several nodes, one with several ranks has an actor that fetches for all of them. What an actor returns depends on
    its arguments alone, so Ray may restart it and repeat a call at any time.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # The block maker itself is the actor: its module does not import torch, so a reader starts fast and stays small.
    # A byte of memory: an actor that asks for nothing is put on any node, whatever its strategy says.
    reader, part, of_node = (
        ray.remote(num_cpus=0, memory=1, max_restarts=-1, max_task_retries=-1)(kind)
        for kind in (BlockMaker, SamplerPart, NodeParts)
    )
    ranks_of = {node: [rank for rank, own in enumerate(nodes) if own == node] for node in sorted(set(nodes))}
    place_of = {node: NodeAffinitySchedulingStrategy(node, soft=True) for node in ranks_of}
    placed = list(itertools.islice(itertools.cycle([*place_of.values()] or ["SPREAD"]), count))
    parts = [
        part.options(scheduling_strategy=place).remote(
            spec.path, number, count, spec.sampler_seed, spec.unlabeled.popularity
        )
        for number, place in enumerate(placed if spec.samples and count > 1 else ())
    ]
    readers = [reader.options(scheduling_strategy=place).remote(spec, parts, count) for place in placed]
    of_nodes = {}
    for node, ranks in ranks_of.items():
        if len(ranks_of) > 1 and len(ranks) > 1:
            shared = of_node.options(scheduling_strategy=place_of[node]).remote(readers, ranks, len(nodes))
            of_nodes |= dict.fromkeys(ranks, shared)
    return Readers(readers, parts, of_nodes)
