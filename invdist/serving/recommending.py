"""Recommendations and scores of a run as tables of raw ids, in memory batch by batch or as an output folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from invdist.data.schema import SPLITS, TRAINING_LABELED
from invdist.data.stream.observed import ObservedPairs
from invdist.runtime.errors import UserError
from invdist.serving.annotating import checkpoint_identity
from invdist.serving.formats import table_writer
from invdist.serving.opened import OpenedRun
from invdist.serving.output import Output
from invdist.serving.pairs import COUNTS, Pairs, Source
from invdist.serving.scoring import Scorer
from invdist.serving.topk import TopK

SEEN = TRAINING_LABELED
"""Splits whose items are not recommended again, unless asked otherwise: the labeled rows of training."""

Progress = Callable[[int], None]


def recommendations(
    run: OpenedRun, k: int, users: np.ndarray | None = None, seen: Sequence[str] = SEEN
) -> tuple[pa.Schema, Iterator[pa.Table]]:
    """The schema and the tables of the `k` best items of users (indices; None: all), best first.

    Columns: `user`, `rank` from 1, `item`, `score`. Items that a user has in the splits `seen` are left out.
    """
    unknown = [split for split in seen if split not in SPLITS]
    if unknown:
        raise UserError(f"there is no split {unknown[0]!r}; there are {', '.join(SPLITS)}")
    observed = ObservedPairs.of(run.dataset, seen) if seen else None
    top = TopK(run.model, k, observed)
    schema = pa.schema(
        [
            pa.field("user", run.users.raw.type),
            pa.field("rank", pa.int32()),
            pa.field("item", run.items.raw.type),
            pa.field("score", pa.float32()),
        ]
    )

    def tables() -> Iterator[pa.Table]:
        for best in top.of(np.arange(len(run.users)) if users is None else users):
            columns = [run.users.take(best.user), pa.array(best.rank), run.items.take(best.item), pa.array(best.score)]
            yield pa.table(columns, schema=schema)

    return schema, tables()


class ScoreTables:
    """Tables `user`, `item`, `score` (logit), `probability` of pairs, and what was met on the way."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self.counts = Counter[str](dict.fromkeys((*COUNTS, "scored"), 0))
        fields = [pa.field("user", scorer.users.raw.type), pa.field("item", scorer.items.raw.type)]
        fields += [pa.field("score", pa.float32()), pa.field("probability", pa.float32())]
        self.schema = pa.schema(fields + [pa.field("known", pa.bool_())] * (scorer.unknown == "prior"))

    def of(self, source: Source) -> Iterator[pa.Table]:
        """The tables of an input, in its order."""
        for part in source.parts:
            for pairs in source.read(part, self.scorer.users, self.scorer.items):
                yield self.table(pairs)

    def table(self, pairs: Pairs) -> pa.Table:
        """The rows of some pairs."""
        self.counts.update(pairs.counts)
        pairs, score, known = self.scorer.score(pairs)
        self.counts["scored"] += len(score)
        probability = (1 / (1 + np.exp(-score.astype(np.float64)))).astype(np.float32)
        columns = [pairs.raw_user, pairs.raw_item, pa.array(score), pa.array(probability), pa.array(known)]
        return pa.table(columns[: len(self.schema)], schema=self.schema)


def write_tables(
    run: OpenedRun,
    where: str,
    name: str,
    kind: str,
    schema: pa.Schema,
    tables: Iterator[pa.Table],
    about: Callable[[], dict[str, Any]] = dict,
    progress: Progress = lambda rows: None,
) -> dict[str, Any]:
    """Streams tables into the new folder `where` as `NAME.KIND` with a manifest; gives the manifest.

    `about` is asked at the end for what else the manifest should say.
    """
    identity = {
        "kind": f"invdist {name}",
        "checkpoint": checkpoint_identity(run.checkpoint),
        "dataset": run.dataset.fingerprint,
    }
    output, rows = Output(where, identity), 0
    with output.create(f"{name}.{kind}") as file, table_writer(file, schema, kind) as writer:
        for table in tables:
            writer.write_table(table)
            rows += len(table)
            progress(rows)
    manifest = {"run": str(run.folder), "file": f"{name}.{kind}", "rows": rows, **about()}
    output.finish(manifest)
    return {**output.job, **manifest}
