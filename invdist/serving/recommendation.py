"""Recommendations: tables of the best items of users, by raw ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, get_args

import numpy as np
import pyarrow as pa

from invdist.data.schema import SPLITS
from invdist.runtime.errors import UserError
from invdist.serving.raw_ids import UNKNOWN, RawIds, pc
from invdist.serving.run import TrainedRun
from invdist.serving.seen import SeenPairs
from invdist.serving.topk import Best, TopK, check_k

SEEN = ("train", "training_test")
"""Splits whose items are not recommended again by default: the labeled rows of training."""

UnknownUser = Literal["null", "drop"]


class AskedUsers:
    """The users to recommend to: each distinct one once, in the order in which they were given."""

    def __init__(self, given: pa.Array, users: RawIds) -> None:
        cast = users.cast(given)
        self.raw = pc.unique(cast)
        """Raw ids in the data set's type; one null for all ids that are missing or of the wrong type."""
        self.index = users.indices(self.raw)
        unknown = pa.array(users.indices(cast) == UNKNOWN)
        self.unknown: list[str] = [str(raw) for raw in pc.unique(given.filter(unknown)).to_pylist()]
        """Users that the data set does not have, as they were given."""

    @property
    def known(self) -> np.ndarray:
        """Indices of the users that the data set has (int64)."""
        return self.index[self.index != UNKNOWN]


Ranked = Callable[[np.ndarray | range, int, Sequence[str]], Iterator[tuple[Best, pa.Table]]]
"""The best items of users, and their `recommendation_table`: (users, k, splits with items to leave out)."""


def recommendations(
    run: TrainedRun,
    k: int,
    users: AskedUsers | None = None,
    seen: Sequence[str] = SEEN,
    unknown: UnknownUser = "null",
    ranked: Ranked | None = None,
) -> tuple[pa.Schema, Iterator[pa.Table]]:
    """The schema and the tables of the `k` best items of users (None: all), best first.

    Columns: `user`, `rank` from 1, `item`, `score`. Items that a user has in the splits `seen` are left out. An
    unknown user has one row with nothing but the user, or with `drop` none. `ranked` finds the best, by default with
    the run's model in this process.
    """
    wrong = [split for split in seen if split not in SPLITS]
    if wrong:
        raise UserError(f"there is no split {wrong[0]!r}; there are {', '.join(SPLITS)}")
    if unknown not in get_args(UnknownUser):
        raise UserError(f"unknown={unknown!r}: expected {', '.join(get_args(UnknownUser))}")
    check_k(k, run.dataset.items)
    if ranked is None:
        top = TopK(run.model, k, SeenPairs.read(run.dataset, seen) if seen else None)
        return recommendation_tables(top, users, run.users, run.items, unknown)
    return _with_schema(ranked(_asked(users, run.users), k, seen), users, run.users, run.items, unknown)


def recommendation_tables(
    top: TopK, asked: AskedUsers | None, users: RawIds, items: RawIds, unknown: UnknownUser
) -> tuple[pa.Schema, Iterator[pa.Table]]:
    """The same, of what finds the best items and the raw ids of both sides."""
    best = top.of(_asked(asked, users))
    tables = ((some, recommendation_table(some, users, items)) for some in best)
    return _with_schema(tables, asked, users, items, unknown)


def recommendation_table(best: Best, users: RawIds, items: RawIds) -> pa.Table:
    """The best items by raw ids."""
    columns = [users.take(best.user), pa.array(best.rank), items.take(best.item), pa.array(best.score)]
    return pa.table(columns, schema=_schema(users, items))


def _asked(asked: AskedUsers | None, users: RawIds) -> np.ndarray | range:
    return range(len(users)) if asked is None else asked.known


def _schema(users: RawIds, items: RawIds) -> pa.Schema:
    return pa.schema(
        [
            pa.field("user", users.type),
            pa.field("rank", pa.int32()),
            pa.field("item", items.type),
            pa.field("score", pa.float32()),
        ]
    )


def _with_schema(
    tables: Iterator[tuple[Best, pa.Table]],
    asked: AskedUsers | None,
    users: RawIds,
    items: RawIds,
    unknown: UnknownUser,
) -> tuple[pa.Schema, Iterator[pa.Table]]:
    schema = _schema(users, items)
    if asked is None or unknown == "drop":
        return schema, (table for _, table in tables)
    return schema, _with_unknown(asked, schema, tables)


def _with_unknown(users: AskedUsers, schema: pa.Schema, tables: Iterator[tuple[Best, pa.Table]]) -> Iterator[pa.Table]:
    """Tables of known users, with a row for each unknown one in its place."""
    unknown = np.flatnonzero(users.index == UNKNOWN)
    place = np.zeros(users.index.max(initial=0) + 1, np.int64)  # of a known user, by index
    known = np.flatnonzero(users.index != UNKNOWN)
    place[users.index[known]] = known
    written = 0

    def rows(count: int) -> pa.Table:
        raw = users.raw.take(pa.array(unknown[written:count]))
        nulls = [pa.nulls(len(raw), field.type) for field in schema]
        return pa.table([raw, *nulls[1:]], schema=schema)

    for best, table in tables:
        if len(unknown) and len(table):
            places = place[best.user]
            count = int(np.searchsorted(unknown, places[-1]))  # of those before the last known user here
            order = np.argsort(np.concatenate([places, unknown[written:count]]), kind="stable")
            table = pa.concat_tables([table, rows(count)]).take(pa.array(order)).combine_chunks()
            written = count
        yield table
    if written < len(unknown):
        yield rows(len(unknown))
