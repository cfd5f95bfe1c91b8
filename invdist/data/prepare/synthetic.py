"""A synthetic feed with known truth: users who like some topics, a policy that guesses which, and what was watched.

Every number of the world is drawn from the seed. The true preference of any pair is
`sigmoid(user_bias + item_bias + intercept + user_factors . item_factors)`; what a log shows of it is noisy:

    exposure      the feed's policy: mostly topics it believes the user likes, some hits, some exploration
    liked         a coin with the true preference
    finish rate   high if liked, low if not, blurred, lower for long videos, now and then an accidental swipe
    like, hate    rare, and only in agreement with `liked` and with what was watched
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from invdist.data.sorted_sets import contains, sorted_set
from invdist.runtime.errors import UserError

FACTORS = 4
_BLOCK_ROWS = 400_000
_ROUNDS = 40
_MOST_SEEN = 0.25
_MONTH_MS = 30 * 24 * 3600 * 1000


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The size and character of a synthetic feed."""

    users: int
    items: int
    labeled_rows: int
    """Rows that the finish-rate rule (0.2, 0.8) is clear about."""
    positive_share: float = 0.678
    """Share of positives among them."""
    policy: float = 0.4
    """How closely exposures follow what the policy believes about tastes; 0: not at all."""
    label_fraction: float = 1.0
    """Share of the training labels to keep, unless the option says otherwise."""


PRESETS: dict[str, Scale] = {
    "tiny": Scale(users=200, items=300, labeled_rows=6_000),
    # As in a real feed, few labels and exposures that tell tastes: what the method is for shows in a short run.
    "small": Scale(users=2_000, items=3_000, labeled_rows=200_000, policy=0.8, label_fraction=0.1),
    "microvideo": Scale(users=37_692, items=131_690, labeled_rows=9_462_492),
}


class World:
    """Who likes what, who is shown what: the part of a synthetic feed that has no rows."""

    def __init__(self, scale: Scale, seed: int) -> None:
        self.scale = scale
        rng = np.random.default_rng([seed, 1])
        topics = int(np.clip(scale.items // 50, 4, 64))
        centres = rng.normal(size=(topics, FACTORS)).astype(np.float32)
        centres /= np.linalg.norm(centres, axis=1, keepdims=True)

        topic = rng.choice(topics, scale.items, p=_power_law(topics, 0.5))
        self.item_factors = 0.8 * centres[topic] + 0.25 * _normal(rng, scale.items, FACTORS)
        popularity = _power_law(scale.items, 0.75)[rng.permutation(scale.items)]
        hit = np.log(popularity) - np.log(popularity).mean()
        self.item_bias = (0.6 * _normal(rng, scale.items) + 0.3 * hit / hit.std()).astype(np.float32)
        self.duration_ms = np.exp(9.7 + 0.6 * _normal(rng, scale.items)).astype(np.float32)

        tastes = rng.dirichlet(np.full(topics, 3.0 / topics), scale.users).astype(np.float32)
        self.user_factors = tastes @ centres + 0.15 * _normal(rng, scale.users, FACTORS)
        self.user_factors *= 5.0 / np.linalg.norm(self.user_factors, axis=1, keepdims=True)
        self.user_bias = 0.5 * _normal(rng, scale.users)
        self.intercept = 0.0

        # The policy knows tastes only roughly: it goes by a noisy view of them.
        belief = (self.user_factors + 0.8 * _normal(rng, scale.users, FACTORS)) @ centres.T
        belief = np.exp(scale.policy * (belief - belief.max(1, keepdims=True)))
        self._topic_cdf = np.cumsum(belief / belief.sum(1, keepdims=True), axis=1)
        self._topic_cdf[:, -1] = 1.0
        self._by_topic = np.lexsort((rng.random(scale.items), topic))
        self._hit_cdf = np.cumsum(popularity[self._by_topic])
        self._hit_cdf /= self._hit_cdf[-1]
        last = np.searchsorted(topic[self._by_topic], np.arange(topics), side="right")
        first = np.searchsorted(topic[self._by_topic], np.arange(topics), side="left")
        bounds = np.concatenate([[0.0], self._hit_cdf])
        self._topic_low, self._topic_high = bounds[first], bounds[last]
        self._empty_topic = first == last

        self.quotas = _quotas(rng, scale)
        self._calibrate(np.random.default_rng([seed, 2]))

    def logit(self, user: np.ndarray, item: np.ndarray) -> np.ndarray:
        """True preference logits (float32) of pairs."""
        taste = np.einsum("nd,nd->n", self.user_factors[user], self.item_factors[item])
        return taste + self.user_bias[user] + self.item_bias[item] + np.float32(self.intercept)

    def expose(self, rng: np.random.Generator, user: np.ndarray) -> np.ndarray:
        """One item (int64) that the policy shows to each of `user`; pairs may repeat."""
        rows = len(user)
        topics = self._topic_cdf.shape[1]
        # Rows of the table shifted by their number are one sorted array: a single search finds all topics.
        first = user.min()
        flat = (self._topic_cdf[first : user.max() + 1] + np.arange(user.max() + 1 - first)[:, None]).ravel()
        topic = np.searchsorted(flat, (user - first) + rng.random(rows), side="right") % topics
        how = rng.random(rows)
        low, high = self._topic_low[topic], self._topic_high[topic]
        popular = (how > 0.7) | self._empty_topic[topic]
        low[popular], high[popular] = 0.0, 1.0
        at = np.searchsorted(self._hit_cdf, low + rng.random(rows) * (high - low), side="right")
        item = self._by_topic[np.minimum(at, self.scale.items - 1)]
        explored = np.flatnonzero(how > 0.9)
        item[explored] = rng.integers(0, self.scale.items, len(explored))
        return item

    def watch(self, rng: np.random.Generator, user: np.ndarray, item: np.ndarray) -> dict[str, np.ndarray]:
        """What happened at each exposure: play time, duration, like, hate, and the true preference behind it."""
        rows = len(user)
        truth = 1 / (1 + np.exp(-self.logit(user, item)))
        liked = rng.random(rows, dtype=np.float32) < truth
        duration = self.duration_ms[item]
        lean = np.where(liked, np.float32(1.7), np.float32(-1.7)) - 0.3 * (np.log(duration) - 9.7)
        rate = 1 / (1 + np.exp(-(lean + 1.4 * rng.standard_normal(rows, dtype=np.float32))))
        chance = rng.random(rows, dtype=np.float32)
        rate = np.where(liked & (chance < 0.1), 1 + 10 * chance, rate)  # watched again
        rate = np.where(chance > 0.97, (chance - 0.97) * 6, rate)  # swiped by accident
        rare = rng.random(rows, dtype=np.float32)
        return {
            "play_time": np.floor(rate * duration),
            "duration": np.floor(duration),
            "like": liked & (rate > 0.5) & (rare < 0.04),
            "hate": ~liked & (rate < 0.5) & (rare < 0.01),
            "truth": truth,
        }

    def _calibrate(self, rng: np.random.Generator) -> None:
        """Sets the intercept such that clear exposures have the wanted share of positives."""
        # Whole users, each pair once, as in the log: a user's few favourite hits would count too often otherwise.
        count = max(int(np.searchsorted(np.cumsum(self.quotas), 150_000)), 1)
        user = np.repeat(np.arange(count), self.quotas[:count] * 7 // 4 + 4)
        user, item = np.divmod(sorted_set(user * self.scale.items + self.expose(rng, user)), self.scale.items)
        low, high = -8.0, 8.0
        for _ in range(14):
            self.intercept = (low + high) / 2
            label = clear_label(self.watch(np.random.default_rng(3), user, item))
            share = np.count_nonzero(label == 1) / max(np.count_nonzero(label >= 0), 1)
            low, high = (low, self.intercept) if share > self.scale.positive_share else (self.intercept, high)


def clear_label(seen: dict[str, np.ndarray]) -> np.ndarray:
    """1, 0 or -1 (int8) by the paper's finish rates: what the size of a synthetic feed is counted in."""
    rate = seen["play_time"] / seen["duration"]
    return np.where(rate > 0.8, 1, np.where(rate < 0.2, 0, -1)).astype(np.int8)


class SyntheticLog:
    """The log of a synthetic feed (a `RawLog`), made user block by user block: memory does not grow with rows."""

    has_time = True
    has_day = False
    has_truth = True
    looks = False

    def __init__(self, name: str, scale: Scale, seed: int) -> None:
        if scale.labeled_rows < scale.users:
            raise UserError(f"labeled_rows={scale.labeled_rows}: expected at least one per user ({scale.users})")
        most = scale.users * _most_seen(scale)
        if scale.labeled_rows > most:
            raise UserError(f"labeled_rows={scale.labeled_rows}: expected at most a quarter of all pairs ({most})")
        self.name, self.scale, self.seed = name, scale, seed
        self.owed = 0
        self.world = World(scale, seed)

    def describe(self) -> dict[str, Any]:
        """The preset, its size and the seed."""
        return {"kind": "synthetic", "preset": self.name, "seed": self.seed, **vars(self.scale)}

    def universe(self) -> tuple[int, int]:
        """(users, items): every index is a user, shown or not."""
        return self.scale.users, self.scale.items

    def latent(self) -> dict[str, pa.Table]:
        """Biases and factors of users and items; the intercept is part of the users' biases."""
        tables = {}
        world = self.world
        for name, bias, factors in (
            ("users", world.user_bias + np.float32(world.intercept), world.user_factors),
            ("items", world.item_bias, world.item_factors),
        ):
            vectors = pa.FixedSizeListArray.from_arrays(pa.array(factors.ravel(), pa.float32()), FACTORS)
            tables[name] = pa.table({"bias": pa.array(bias, pa.float32()), "factors": vectors})
        return tables

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The exposures; exactly `labeled_rows` of them are clear by finish rate."""
        return self.read((0, len(self._blocks()) - 1))

    def pieces(self, rows: int, size: int) -> list[tuple[int, int]]:
        """Blocks of users."""
        return list(pairwise(range(len(self._blocks()))))

    def look(self, piece: tuple[int, int]) -> None:
        """Nothing has to be known before reading."""

    def after_look(self, found: Sequence[None]) -> None:
        """Nothing has to be known before reading."""

    def read(self, piece: tuple[int, int]) -> Iterator[pa.RecordBatch]:
        """The exposures of some blocks of users. What they are `owed` then has to be in the block that follows."""
        blocks, quotas = self._blocks(), self.world.quotas
        self.owed = 0
        for number in range(*piece):
            start, stop = blocks[number], blocks[number + 1]
            wanted = quotas[start:stop].copy()
            wanted += self.owed // len(wanted)
            wanted[: self.owed % len(wanted)] += 1
            rows, self.owed = self._block(np.random.default_rng([self.seed, 4, number]), start, wanted)
            yield pa.RecordBatch.from_pydict(rows)
        if self.owed and piece[1] == len(blocks) - 1:
            raise UserError(
                f"this feed is too small for {self.scale.labeled_rows} labeled rows: {self.owed} are missing"
            )

    def _blocks(self) -> np.ndarray:
        """The first user of each block, and the end of the last."""
        ends = np.cumsum(self.world.quotas)
        edges = np.searchsorted(ends, np.arange(_BLOCK_ROWS, ends[-1], _BLOCK_ROWS))
        return np.unique(np.concatenate([[0], edges, [self.scale.users]]))

    def _block(
        self, rng: np.random.Generator, start: int, wanted: np.ndarray, present: np.ndarray | None = None
    ) -> tuple[dict[str, np.ndarray], int]:
        """Exposures of users `start...` until each has its `wanted` clear ones, and how many clear ones are missing.

        With `present` (bool by item) only items that are present are shown.
        """
        items = self.scale.items
        kept: dict[str, np.ndarray] = {}
        missing = wanted
        for _ in range(_ROUNDS):
            local = np.repeat(np.arange(len(wanted)), np.where(missing > 0, missing * 7 // 4 + 4, 0))
            item = self.world.expose(rng, start + local)
            if present is not None:
                local, item = local[present[item]], item[present[item]]
            pair = local * items + item
            _, first = np.unique(pair, return_index=True)
            first.sort()
            if kept:
                first = first[~contains(np.sort(kept["local"] * items + kept["item"]), pair[first])]
            local, item = local[first], item[first]
            seen = {"local": local, "item": item, **self.world.watch(rng, start + local, item)}
            kept = {name: np.concatenate([kept[name], seen[name]]) if kept else seen[name] for name in seen}
            clear = clear_label(kept) >= 0
            missing = wanted - np.bincount(kept["local"][clear], minlength=len(wanted))
            if not np.any(missing > 0):
                break
        order = np.argsort(kept["local"], kind="stable")
        kept = {name: column[order] for name, column in kept.items()}
        clear = clear_label(kept) >= 0
        before = np.cumsum(clear) - clear
        offset = np.searchsorted(kept["local"], np.arange(len(wanted)))
        before -= np.append(before, 0)[offset][kept["local"]]
        chosen = before < wanted[kept["local"]]
        rows = {name: column[chosen] for name, column in kept.items()}
        owed = int(np.maximum(missing, 0).sum())
        user = (start + rows["local"]).astype(np.int32)
        return {
            "user": user,
            "item": rows["item"].astype(np.int32),
            **{name: rows[name].astype(np.float64) for name in ("play_time", "duration", "like", "hate")},
            "time": rng.integers(0, _MONTH_MS, len(user)),
            "truth": rows["truth"].astype(np.float32),
        }, owed


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def _power_law(size: int, exponent: float) -> np.ndarray:
    weight = np.arange(1, size + 1, dtype=np.float64) ** -exponent
    return weight / weight.sum()


def _most_seen(scale: Scale) -> int:
    """Clear exposures that one user may have."""
    return max(int(_MOST_SEEN * scale.items), 1)


def _quotas(rng: np.random.Generator, scale: Scale) -> np.ndarray:
    """Clear exposures of each user (int64): a power law of activity, capped, that sums to `labeled_rows`."""
    cap = _most_seen(scale)
    weight = rng.permutation(_power_law(scale.users, 0.5))
    quota = np.ones(scale.users, np.int64)
    while (left := scale.labeled_rows - int(quota.sum())) > 0:
        room = quota < cap
        share = np.where(room, weight, 0.0)
        share = np.floor(share / share.sum() * left).astype(np.int64)
        if not share.any():
            share[np.flatnonzero(room)[:left]] = 1
        quota = np.minimum(quota + share, cap)
    return quota
