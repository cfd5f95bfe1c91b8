"""Annotates pairs: the soft labels that the inverse dual loss gives them, part by part, each part by itself."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from invdist.learning.losses import annotate
from invdist.runtime.errors import UserError
from invdist.runtime.files import Folder, describe_os_error
from invdist.serving.output import complete_file
from invdist.serving.pairs import Pairs, Part, Source
from invdist.serving.scoring import Scorer

COUNTS_KEY = b"invdist.counts"


def soft_labels(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(w1, w0) of scores, float32."""
    weights = annotate(torch.from_numpy(np.asarray(scores, np.float64)))
    return weights.w1.float().numpy(), weights.w0.float().numpy()


@dataclass(frozen=True, slots=True)
class Annotator:
    """Turns pairs into annotated rows: `user`, `item` (raw), `score`, `w1`, `w0`, `label`, `confidence`.

    `label` is 1 where `w1 >= threshold`; `confidence` is `|w1 - w0|`, 0 for undecided. Where unknown pairs are scored
    too, `known` tells them.
    """

    scorer: Scorer
    threshold: float

    def schema(self) -> pa.Schema:
        """The columns."""
        fields = [
            pa.field("user", self.scorer.users.raw.type),
            pa.field("item", self.scorer.items.raw.type),
            *(pa.field(name, pa.float32()) for name in ("score", "w1", "w0")),
            pa.field("label", pa.int8()),
            pa.field("confidence", pa.float32()),
        ]
        return pa.schema(fields + [pa.field("known", pa.bool_())] * (self.scorer.unknown == "prior"))

    def table(self, pairs: Pairs) -> pa.Table:
        """The annotated rows of pairs."""
        pairs, score, known = self.scorer.score(pairs)
        w1, w0 = soft_labels(score)
        label = (w1 >= np.float32(self.threshold)).astype(np.int8)
        columns = [pairs.raw_user, pairs.raw_item, score, w1, w0, label, np.abs(w1 - w0), known]
        schema = self.schema()
        return pa.table([pa.array(c) for c in columns[: len(schema)]], schema=schema)


class PartAnnotator:
    """Reads a part, annotates it and writes `NAME.parquet` into the output folder, complete or not at all.

    What it met is noted in the file itself, so that a later run, which finds the part done, knows it too.
    """

    def __init__(self, source: Source, annotator: Annotator, folder: Folder) -> None:
        self.source, self.annotator, self.folder = source, annotator, folder

    def annotate(self, part: Part) -> Counter[str]:
        """The counts of a part, now written."""
        counts = Counter[str]()
        try:
            self._write(part, counts)
        except OSError as error:
            raise UserError(f"cannot write {self.folder}/{part.name}.parquet: {describe_os_error(error)}") from error
        return counts

    def _write(self, part: Part, counts: Counter[str]) -> None:
        scorer = self.annotator.scorer
        with complete_file(self.folder, f"{part.name}.parquet") as file:
            with pq.ParquetWriter(file, self.annotator.schema(), compression="zstd") as writer:
                for pairs in self.source.read(part, scorer.users, scorer.items):
                    table = self.annotator.table(pairs)
                    writer.write_table(table)
                    counts.update(pairs.counts)
                    counts["annotated"] += len(table)
                    counts["positive"] += int(np.count_nonzero(table["label"].to_numpy()))
                writer.add_key_value_metadata({COUNTS_KEY: json.dumps(counts).encode()})


def noted_counts(folder: Folder, part: Part) -> Counter[str] | None:
    """What an annotated part says it met; None if the part is not there whole."""
    try:
        with folder.open(f"{part.name}.parquet") as file:
            noted: dict[bytes, Any] = pq.read_metadata(file).metadata or {}
            return Counter(json.loads(noted[COUNTS_KEY]))
    except (OSError, pa.ArrowException, KeyError, ValueError):
        return None
