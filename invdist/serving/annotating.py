"""A whole annotation job: an input, a run and an output folder; interrupted, it continues where it was."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from invdist.data.dataset import Dataset
from invdist.data.schema import MANIFEST as DATASET_FILE
from invdist.evaluation.metrics import ScoredRows, auc
from invdist.runtime.errors import UserError
from invdist.runtime.files import Folder
from invdist.serving.annotator import Annotator, PartAnnotator, noted_counts
from invdist.serving.opened import OpenedRun
from invdist.serving.output import Output
from invdist.serving.pairs import COUNTS, PART_ROWS, FilePairs, Part, Source, UnclearPairs
from invdist.serving.scoring import Scorer, Unknown
from invdist.training.checkpoint import CheckpointInfo

Work = Callable[[Sequence[Part], Source, Annotator, Folder], Iterator[int]]
"""Annotates parts and gives the rows of each as it is done."""


@dataclass(frozen=True, slots=True)
class AnnotationJob:
    """What is to be annotated, with what, and where to."""

    run: OpenedRun
    source: Source
    output: str
    threshold: float = 0.5
    unknown: Unknown = "drop"
    calibration: dict[str, Any] | None = None

    def execute(self, work: Work, progress: Callable[[int, int, int], None] = lambda *_: None) -> dict[str, Any]:
        """Annotates the parts that are not done yet and makes the output whole; gives its manifest.

        `progress` is called with (parts done, parts, rows of this session).
        """
        if not self.source.parts:
            raise UserError("there is nothing to annotate: the input has no rows")
        annotator = Annotator(Scorer.of(self.run, self.unknown), self.threshold)
        output = Output(self.output, self._identity(), resume=True)
        parts = self.source.parts
        left = [part for part in parts if noted_counts(output.folder, part) is None]
        done, rows = len(parts) - len(left), 0
        progress(done, len(parts), 0)
        for count in work(left, self.source, annotator, output.folder) if left else ():
            done, rows = done + 1, rows + count
            progress(done, len(parts), rows)
        manifest = self._manifest(output)
        output.finish(manifest)
        return {**output.job, **manifest}

    def _identity(self) -> dict[str, Any]:
        return {
            "kind": "invdist annotations",
            "checkpoint": checkpoint_identity(self.run.checkpoint),
            "dataset": self.run.dataset.fingerprint,
            "input": self.source.identity(),
            "threshold": self.threshold,
            "unknown": self.unknown,
            "calibration": self.calibration,
        }

    def _manifest(self, output: Output) -> dict[str, Any]:
        total, shards = Counter[str](dict.fromkeys((*COUNTS, "annotated", "positive"), 0)), []
        for part in self.source.parts:
            counts = noted_counts(output.folder, part)
            if counts is None:
                raise UserError(f"{output.folder}/{part.name}.parquet is gone; run the same command again")
            total.update(counts)
            shards.append({"file": f"{part.name}.parquet", "rows": counts["annotated"]})
        manifest: dict[str, Any] = {"run": str(self.run.folder), "counts": dict(total), "shards": shards}
        if isinstance(self.source, UnclearPairs):
            manifest["auc"] = _truth_auc(self.source, output.folder)
        return manifest


def open_source(
    run: OpenedRun, given: Sequence[str | Path], user: str = "user", item: str = "item", part_rows: int = PART_ROWS
) -> Source:
    """The input that `given` names: the run's own prepared data set (its unclear exposures), or files of raw pairs."""
    if len(given) == 1 and ("://" in str(given[0]) or (Path(given[0]) / DATASET_FILE).is_file()):
        dataset = Dataset.open(str(given[0]))
        if dataset.fingerprint != run.dataset.fingerprint:
            raise UserError(
                f"{given[0]} is another data set than the one {run.folder} was trained on, so its indices mean other "
                "users and items: give its pairs by raw ids, as CSV or parquet"
            )
        return UnclearPairs(dataset, part_rows)
    return FilePairs(given, user, item, part_rows)


def in_this_process(parts: Sequence[Part], source: Source, annotator: Annotator, folder: Folder) -> Iterator[int]:
    """Annotates parts one after the other, without Ray."""
    work = PartAnnotator(source, annotator, folder)
    for part in parts:
        yield work.annotate(part)["rows"]


def checkpoint_identity(checkpoint: CheckpointInfo) -> str:
    """Tells a checkpoint from every other: its step and a hash of its files' checksums."""
    digests = sorted(f"{name} {entry.sha256}" for name, entry in checkpoint.manifest.files.items())
    digest = hashlib.sha256("\n".join(digests).encode()).hexdigest()
    return f"step {checkpoint.step}, {digest[:16]}"


def _truth_auc(source: UnclearPairs, folder: Folder) -> float | None:
    """AUC of the scores against truth (preferred: 0.5 or more) where it is known; None where that is nowhere.

    Every row of a prepared data set is known, so annotations stand in the order of its shards.
    """
    dataset = source.dataset
    shards = zip(dataset.shards("unclear"), dataset.shards("truth"), strict=True)
    truth_of = {unclear["file"]: truth["file"] for unclear, truth in shards}  # row by row beside each other
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
