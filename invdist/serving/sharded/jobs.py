"""What the commands ask of the workers of a sharded run. Results are those of one process, to the bit."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from invdist.runtime.files import Folder
from invdist.serving.annotation import Annotator, PartAnnotator, Work
from invdist.serving.evaluation import in_precision_of_training
from invdist.serving.inputs import FilePairs, InputPart, PairSource, match
from invdist.serving.recommendation import recommendation_table
from invdist.serving.scoring import Scorer, ScoreTables, Unknown, logits
from invdist.serving.seen import SeenPairs
from invdist.serving.sharded.workers import Workers
from invdist.serving.topk import Best, FoundItems, Ranker, batches, prepared_items, scored

if TYPE_CHECKING:
    from invdist.serving.sharded.workers import _Worker

_BATCHES_AT_ONCE = 16


def annotate_on_workers(workers: Workers) -> Work:
    """Work for an `AnnotationJob`: each part is read, annotated and written by one worker."""

    def work(parts: Sequence[InputPart], source: PairSource, annotator: Annotator, folder: Folder) -> Iterator[int]:
        shared = workers.share((source, annotator.scorer.unknown, annotator.threshold, folder))
        return workers.map(_annotate, ((part, shared) for part in parts))

    return work


def _annotate(worker: _Worker, part: InputPart, shared: tuple[PairSource, Unknown, float, Folder]) -> int:
    source, unknown, threshold, folder = shared
    return PartAnnotator(source, Annotator(Scorer.of(worker.run, unknown), threshold), folder).annotate(part)["rows"]


def score_on_workers(workers: Workers, source: FilePairs, scores: ScoreTables) -> Iterator[pa.Table]:
    """The tables of `scores.of(source)`: read here, matched and scored by workers."""
    pieces = ((*batch, scores.scorer.unknown) for part in source.parts for batch in source.read_raw(part))
    for table, counts in workers.map(_score, pieces):
        scores.counts.update(counts)
        yield table


def _score(worker: _Worker, user: pa.Array, item: pa.Array, unknown: Unknown) -> tuple[pa.Table, Any]:
    scores = ScoreTables(Scorer.of(worker.run, unknown))
    return scores.table(match(user, item, worker.run.users, worker.run.items)), scores.counts


def logits_on_workers(workers: Workers, user: np.ndarray, item: np.ndarray) -> np.ndarray:
    """Logits of pairs of indices, in the precision of training."""
    rows = workers.run.model.most_pairs
    pieces = ((user[first : first + rows], item[first : first + rows]) for first in range(0, len(user), rows))
    return np.concatenate([np.empty(0, np.float32), *workers.map(_logits, pieces)])


def _logits(worker: _Worker, user: np.ndarray, item: np.ndarray) -> np.ndarray:
    return logits(worker.run.model, user, item, in_precision_of_training(worker.run))


def best_on_workers(
    workers: Workers, users: np.ndarray | range, k: int, seen: Sequence[str], *, tables: bool = True
) -> Iterator[tuple[Best, Any]]:
    """The `k` best items of users as `TopK.of` gives them, and with `tables` the same by raw ids.

    Every worker ranks its items for all users; for each group of batches one of them merges what all have found.
    """
    todo = batches(users, k)
    groups = iter(lambda: list(islice(todo, _BATCHES_AT_ONCE)), [])
    ahead: deque[Any] = deque()
    for number, group in enumerate(groups):
        given = workers.share(group)
        found = [workers.submit(worker, _rank, given, k, tuple(seen)) for worker in range(workers.count)]
        ahead.append(workers.submit(number % workers.count, _merge, given, k, tables, *found))
        if len(ahead) >= 2 * workers.count:
            yield from workers.value(ahead.popleft())
    while ahead:
        yield from workers.value(ahead.popleft())


def _rank(worker: _Worker, group: list[np.ndarray], k: int, seen: tuple[str, ...]) -> list[FoundItems]:
    run = worker.run
    ranker: Ranker = worker.keep((k, seen), lambda: _ranker(worker, k, seen))
    (rows, _), (place, _) = run.model.rows(np.concatenate(group), np.empty(0, np.int64))
    ends = np.cumsum([len(user) for user in group])
    places = np.split(place, ends[:-1])
    return [ranker.best(user, rows[at]) for user, at in zip(group, places, strict=True)]


def _ranker(worker: _Worker, k: int, seen: tuple[str, ...]) -> Ranker:
    items = range(*worker.run.cuts[1].range_of(worker.number))
    pairs = SeenPairs.read(worker.run.dataset, seen, items.start, items.stop) if seen else None
    backbone = worker.run.model.backbone
    return Ranker(backbone, prepared_items(backbone, worker.slice.table("item")), items, k, pairs)


def _merge(
    worker: _Worker, group: list[np.ndarray], k: int, tables: bool, *found: list[FoundItems]
) -> list[tuple[Best, Any]]:
    merged = [FoundItems.merged(parts, k) for parts in zip(*found, strict=True)]
    pairs = ((user[of.place], of.item) for user, of in zip(group, merged, strict=True))
    model, *sides = worker.run.model.of(*map(np.concatenate, zip(*pairs, strict=True)))
    ends = np.cumsum([len(of.place) for of in merged])[:-1]
    places = zip(*(np.split(side, ends) for side in sides), strict=True)
    best = [scored(model, user, of, at) for user, of, at in zip(group, merged, places, strict=True)]
    return [(one, recommendation_table(one, worker.run.users, worker.run.items) if tables else None) for one in best]
