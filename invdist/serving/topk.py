"""The best items of each user over the whole catalogue, exactly, a batch of users at a time.

The catalogue is scored in tiles that fit the cache. Of a tile only the maximum of each *block* of items is compared
with the k-th best score found so far, and only the blocks above it are looked into. So nearly all of the time goes into
matrix products.

Tiles and batches are the same wherever they are computed. So the best of slices of the catalogue (whole tiles each),
merged, are those of the catalogue to the bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from invdist.models.backbone import Backbone
from invdist.models.frozen import FrozenModel, score_in_tiles
from invdist.runtime.errors import UserError
from invdist.runtime.process import one_thread
from invdist.serving.all_pairs import all_pairs
from invdist.serving.seen import SeenPairs

TILE = 2048
"""Items that are scored at once."""
_USERS = 256
_BLOCK = 32
_STRIDE = TILE // _BLOCK  # items of a block are this far apart, so that a maximum is taken over whole vectors
_MOST_FOUND = 1 << 22


class Best(NamedTuple):
    """The best items of some users: users in the order asked, items of a user from best to worst."""

    user: np.ndarray
    rank: np.ndarray
    """From 1."""
    item: np.ndarray
    score: np.ndarray


class FoundItems(NamedTuple):
    """Items found for a batch of users, with their scores by tiles."""

    place: np.ndarray
    """Of the user in the batch."""
    item: np.ndarray
    score: np.ndarray

    @classmethod
    def merged(cls, parts: Sequence[FoundItems], k: int) -> FoundItems:
        """The `k` best of each user, best first; of equal scores the lower item."""
        place, item, score = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.lexsort((item, -score, place))
        kept = order[rank_in_runs(place[order]) <= k]
        return cls(place[kept], item[kept], score[kept])


@torch.inference_mode()
def prepared_items(backbone: Backbone, rows: Tensor) -> list[Any]:
    """The rows of items in tiles, the last one padded, prepared for scoring all pairs."""
    form = all_pairs(backbone)
    return [form.items(pad(tile, (0, 0, 0, TILE - len(tile)))) for tile in (rows.split(TILE) if len(rows) else ())]


class Ranker:
    """Finds the `k` best of a range of the items of a catalogue, those of `seen` left out."""

    def __init__(
        self, backbone: Backbone, tiles: list[Any], items: range, k: int, seen: SeenPairs | None = None
    ) -> None:
        """`tiles` are the `prepared_items`."""
        assert items.start % TILE == 0 or not items, items
        self.k, self._tiles, self._first, self._items, self._seen = k, tiles, items.start, len(items), seen
        self._all_pairs = all_pairs(backbone)

    @torch.inference_mode()
    def best(self, user: np.ndarray, rows: Tensor) -> FoundItems:
        """The best items of a batch of users with these rows."""
        users = self._all_pairs.users(rows)
        floor = torch.full((len(user),), -torch.inf)  # what an item must exceed
        nothing = np.empty(0, np.int64)
        found = [FoundItems(nothing, nothing, np.empty(0, np.float32))]
        for number, (tile, seen) in enumerate(zip(self._tiles, self._seen_by_tile(user), strict=True)):
            scores = self._all_pairs.logits(users, tile)
            scores.view(-1)[seen] = -torch.inf
            scores[:, self._items - number * TILE :] = -torch.inf  # padding, no items
            blocks = scores.unflatten(1, (_BLOCK, _STRIDE))
            maxima = blocks.amax(1)
            if number == 0 and self.k <= TILE:
                # k items are at least as good as the k-th largest maximum.
                kth = (maxima if self.k <= _STRIDE else scores).topk(self.k).values[:, -1]
                floor = torch.nextafter(kth, kth.new_tensor(-torch.inf))
            found.append(self._above(floor, number, blocks, maxima))
            if number & (number + 1) == 0 or number == len(self._tiles) - 1:  # rarely: it costs a sort
                found = [FoundItems.merged(found, self.k)]
                last = np.flatnonzero(rank_in_runs(found[0].place) == self.k)
                # An item of a later tile that is only equal comes after those that were found.
                floor[torch.from_numpy(found[0].place[last])] = torch.from_numpy(found[0].score[last])
        return found[0]

    def _above(self, floor: Tensor, number: int, blocks: Tensor, maxima: Tensor) -> FoundItems:
        """The items of a tile that exceed the floor of their user."""
        place, block = (maxima > floor.unsqueeze(1)).nonzero(as_tuple=True)
        scores = blocks[place, :, block]
        of, within = (scores > floor[place].unsqueeze(1)).nonzero(as_tuple=True)
        item = self._first + number * TILE + within * _STRIDE + block[of]
        return FoundItems(place[of].numpy(), item.numpy(), scores[of, within].numpy())

    def _seen_by_tile(self, user: np.ndarray) -> Sequence[Tensor]:
        """Flat positions in each tile of the seen items of these users."""
        if self._seen is None or not self._tiles:
            return [torch.empty(0, dtype=torch.int64)] * len(self._tiles)
        place, item = self._seen.of(user)
        tile, column = np.divmod(item - self._first, TILE)
        order = np.argsort(tile, kind="stable")
        edges = np.searchsorted(tile[order], np.arange(1, len(self._tiles)))
        return torch.from_numpy((place * TILE + column)[order]).tensor_split(torch.from_numpy(edges))


class TopK:
    """Finds the `k` best items of users, those of `seen` left out. Users with fewer unseen items get fewer.

    Which items are best is decided by their scores as matrix products; of equal ones the lower index. The scores given
    are those of the model called with the pairs themselves, and give the order.
    """

    def __init__(
        self, model: FrozenModel, k: int, seen: SeenPairs | None = None, items: list[Any] | None = None
    ) -> None:
        """`items` are the `prepared_items` of the model, which do not depend on `k`; by default they are made here."""
        check_k(k, len(model.item))
        self.model, self.k = model, k
        tiles = prepared_items(model.backbone, model.item) if items is None else items
        self._ranker = Ranker(model.backbone, tiles, range(len(model.item)), k, seen)

    def of(self, users: np.ndarray | range) -> Generator[Best, None, None]:
        """The best items of `users` (int64 indices), batch after batch, in their order."""
        todo = batches(users, self.k)
        with one_thread() as threads, ThreadPoolExecutor(threads) as pool:
            ahead = deque(pool.submit(self._best, batch) for batch in islice(todo, 2 * threads))
            while ahead:
                best = ahead.popleft().result()
                ahead.extend(pool.submit(self._best, batch) for batch in islice(todo, 1))
                yield best

    def _best(self, user: np.ndarray) -> Best:
        return scored(self.model, user, self._ranker.best(user, self.model.user[torch.from_numpy(user)]))


def batches(users: np.ndarray | range, k: int) -> Iterator[np.ndarray]:
    """The batches in which users are ranked."""
    size = max(1, min(_USERS, _MOST_FOUND // k))
    return (np.asarray(users[start : start + size], np.int64) for start in range(0, len(users), size))


@torch.inference_mode()
def scored(
    model: FrozenModel, user: np.ndarray, found: FoundItems, pairs: tuple[np.ndarray, np.ndarray] | None = None
) -> Best:
    """What was found for a batch of users, with the model's own scores and ordered by them.

    `pairs` are the pairs as indices of the model, if it has not the rows of all users and items.
    """
    place, item, _ = found
    score = score_in_tiles(model, *map(torch.from_numpy, pairs or (user[place], item))).numpy()
    order = np.lexsort((item, -score, place))
    rank = rank_in_runs(place).astype(np.int32)
    return Best(user[place], rank, item[order], score[order])


def check_k(k: int, items: int) -> None:
    """`UserError` if nobody can be given `k` items."""
    if k < 1:
        raise UserError(f"k={k}: expected at least 1 item per user")
    if k > items:
        raise UserError(f"k={k} is more than the {items} items of the catalogue")


def rank_in_runs(values: np.ndarray) -> np.ndarray:
    """1, 2, 3... within each run of equal values."""
    starts = np.flatnonzero(np.append(True, values[1:] != values[:-1])[: len(values)])
    return np.arange(len(values)) - np.repeat(starts, np.diff(np.append(starts, len(values)))) + 1
