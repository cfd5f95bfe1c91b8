"""Annotation: the soft labels that the inverse dual loss gives to pairs, written part by part.

A job reads an input with a run and writes an output folder. Interrupted, it continues with the parts that are missing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from invdist.evaluation.metrics import ScoredRows, auc
from invdist.learning.losses import annotate
from invdist.runtime.errors import UserError
from invdist.runtime.files import Folder, describe_os_error
from invdist.serving.inputs import COUNTS, InputPart, MatchedPairs, PairSource, UnclearPairs
from invdist.serving.output import OutputFolder, kept_parts
from invdist.serving.run import TrainedRun
from invdist.serving.scoring import Scorer, Unknown

Work = Callable[[Sequence[InputPart], PairSource, "Annotator", Folder], Iterator[int]]
"""Annotates parts and gives the rows of each when it is done."""

_COUNTS_KEY = b"invdist.counts"


def soft_labels(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(w1, w0) of scores, float32."""
    weights = annotate(torch.from_numpy(np.asarray(scores, np.float64)))
    return weights.w1.float().numpy(), weights.w0.float().numpy()


@dataclass(frozen=True, slots=True)
class Annotator:
    """Turns pairs into rows `user`, `item` (raw), `score`, `w1`, `w0`, `label`, `confidence`, `known`.

    `label` is 1 where `w1 >= threshold`; `confidence` is `|w1 - w0|`, 0 for undecided. All of them are null where
    there is no score (see `Scorer`).
    """

    scorer: Scorer
    threshold: float

    def schema(self) -> pa.Schema:
        """The columns."""
        return pa.schema(
            [
                pa.field("user", self.scorer.users.type),
                pa.field("item", self.scorer.items.type),
                *(pa.field(name, pa.float32()) for name in ("score", "w1", "w0")),
                pa.field("label", pa.int8()),
                pa.field("confidence", pa.float32()),
                pa.field("known", pa.bool_()),
            ]
        )

    def table(self, pairs: MatchedPairs) -> pa.Table:
        """The annotated rows of pairs."""
        pairs, score, known = self.scorer.score(pairs)
        w1, w0 = soft_labels(score)
        label = (w1 >= np.float32(self.threshold)).astype(np.int8)
        values = [self.scorer.column(v, known) for v in (score, w1, w0, label, np.abs(w1 - w0))]
        return pa.table([pairs.raw_user, pairs.raw_item, *values, pa.array(known)], schema=self.schema())


class PartAnnotator:
    """Annotates parts, each into `NAME.parquet` of the output folder, which appears only when it is complete.

    Row counts are stored in the file itself, so a later job that finds the part done knows them too.
    """

    def __init__(self, source: PairSource, annotator: Annotator, folder: Folder) -> None:
        self.source, self.annotator, self.folder = source, annotator, folder

    def annotate(self, part: InputPart) -> Counter[str]:
        """Writes a part and gives its counts."""
        counts = Counter[str]()
        try:
            self._write(part, counts)
        except OSError as error:
            raise UserError(
                f"cannot write {self.folder}/{part.name}.parquet: {describe_os_error(error)}; {kept_parts(self.folder)}"
            ) from error
        return counts

    def _write(self, part: InputPart, counts: Counter[str]) -> None:
        scorer = self.annotator.scorer
        with self.folder.create(f"{part.name}.parquet") as file:
            with pq.ParquetWriter(file, self.annotator.schema(), compression="zstd") as writer:
                for pairs in self.source.read(part, scorer.users, scorer.items):
                    table = self.annotator.table(pairs)
                    writer.write_table(table)
                    counts.update(pairs.counts)
                    counts["written"] += len(table)
                    counts["annotated"] += len(table) - table["w1"].null_count
                    counts["positive"] += int(np.count_nonzero(table["label"].drop_null().to_numpy()))
                writer.add_key_value_metadata({_COUNTS_KEY: json.dumps(counts).encode()})


def stored_counts(folder: Folder, part: InputPart) -> Counter[str] | None:
    """The counts of an annotated part; None if the part is not there or not complete."""
    try:
        with folder.open(f"{part.name}.parquet") as file:
            stored: dict[bytes, Any] = pq.read_metadata(file).metadata or {}
            return Counter(json.loads(stored[_COUNTS_KEY]))
    except (OSError, pa.ArrowException, KeyError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class AnnotationJob:
    """What to annotate, with what, and where to."""

    run: TrainedRun
    source: PairSource
    output: str
    threshold: float = 0.5
    unknown: Unknown = "null"
    calibration: dict[str, Any] | None = None

    def execute(self, work: Work, progress: Callable[[int, int, int], None] = lambda *_: None) -> dict[str, Any]:
        """Annotates the parts that are not done yet, completes the output and gives its manifest.

        `progress` is called with (parts done, parts in all, rows annotated by this call).
        """
        if not self.source.parts:
            raise UserError("there is nothing to annotate: the input has no rows")
        annotator = Annotator(Scorer.of(self.run, self.unknown), self.threshold)
        with OutputFolder(self.output, self._identity(), resume=True) as output:
            parts = self.source.parts
            left = [part for part in parts if stored_counts(output.folder, part) is None]
            done, rows = len(parts) - len(left), 0
            progress(done, len(parts), 0)
            for count in work(left, self.source, annotator, output.folder) if left else ():
                done, rows = done + 1, rows + count
                progress(done, len(parts), rows)
            return output.finish(self._manifest(output.folder))

    def _identity(self) -> dict[str, Any]:
        return {
            "kind": "invdist annotations",
            "checkpoint": self.run.about_checkpoint(),
            "dataset": self.run.dataset.fingerprint,
            "input": self.source.identity(),
            "threshold": self.threshold,
            "unknown": self.unknown,
            "calibration": self.calibration,
        }

    def _manifest(self, folder: Folder) -> dict[str, Any]:
        total, shards = Counter[str](dict.fromkeys((*COUNTS, "written", "annotated", "positive"), 0)), []
        for part in self.source.parts:
            counts = stored_counts(folder, part)
            if counts is None:
                raise UserError(f"{folder}/{part.name}.parquet has been removed; run the same command again")
            total.update(counts)
            shards.append({"file": f"{part.name}.parquet", "rows": counts["written"]})
        manifest: dict[str, Any] = {"run": str(self.run.folder), "counts": dict(total), "shards": shards}
        if isinstance(self.source, UnclearPairs):
            manifest["auc"] = _truth_auc(self.source, folder)
        return manifest


def in_this_process(
    parts: Sequence[InputPart], source: PairSource, annotator: Annotator, folder: Folder
) -> Iterator[int]:
    """Annotates parts one after the other, without Ray."""
    work = PartAnnotator(source, annotator, folder)
    for part in parts:
        yield work.annotate(part)["rows"]


def _truth_auc(source: UnclearPairs, folder: Folder) -> float | None:
    """AUC of the scores against truth (preferred: 0.5 or more) where it is known; None if it is known nowhere.

    All pairs of a data set are known, so annotations have the order of its shards.
    """
    dataset = source.dataset
    shards = zip(dataset.shards("unclear"), dataset.shards("truth"), strict=True)
    truth_of = {unclear["file"]: truth["file"] for unclear, truth in shards}  # aligned row by row
    positives: list[np.ndarray] = []
    scores: list[np.ndarray] = []
    for part in source.parts:
        with dataset.parquet(truth_of[part.file]) as file:
            truth = file.read_row_groups(part.row_groups, ["truth"])["truth"].to_numpy()
        known = ~np.isnan(truth)
        if known.any():
            with folder.open(f"{part.name}.parquet") as file:
                scores.append(pq.read_table(file, columns=["score"])["score"].to_numpy()[known])
            positives.append(truth[known] >= 0.5)
    positive = np.concatenate(positives) if positives else np.empty(0, bool)
    if positive.all() or not positive.any():
        return None
    score = np.concatenate(scores)
    return float(auc(ScoredRows.checked(np.zeros(len(score), int), positive.astype(int), score, k=1)))
