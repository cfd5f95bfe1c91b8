"""What a prepared data set is made of: folders, columns, and the manifest that lists them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pyarrow as pa

VERSION = 1
MANIFEST = "dataset.json"
ROW_GROUP_ROWS = 16_384

TRAINING_LABELED: tuple[str, ...] = ("train", "training_test")
"""Splits whose labels a strategy may learn from."""
LABELED_SPLITS: tuple[str, ...] = (*TRAINING_LABELED, "valid", "test")
"""Splits whose interactions have a label."""
SPLITS: tuple[str, ...] = (*LABELED_SPLITS, "unclear")
"""All folders of shards. `unclear` holds exposures without a label: the natural unlabeled data."""
OBSERVED_SPLITS: tuple[str, ...] = (*TRAINING_LABELED, "unclear")
"""Splits whose pairs training has seen. Valid and test are not among them: they are the future."""

UNCLEAR_LABEL = -1

_PAIR = [pa.field("user", pa.int32(), nullable=False), pa.field("item", pa.int32(), nullable=False)]
SCHEMAS: dict[str, pa.Schema] = {
    **{split: pa.schema([*_PAIR, pa.field("label", pa.int8(), nullable=False)]) for split in LABELED_SPLITS},
    "unclear": pa.schema(_PAIR),
    "truth": pa.schema([pa.field("truth", pa.float32(), nullable=False)]),
}
"""Columns of the shards in each folder. `truth` is aligned with `unclear`, shard by shard and row by row."""
DAY = pa.field("day", pa.int32(), nullable=False)
"""A further column of data sets that were prepared onto another: the day of the chain that brought the row."""
SET_ASIDE = pa.field("label", pa.int8(), nullable=False)
"""A further column of `unclear` in such data sets: the label that a model has learned from on an earlier day, or -1."""
REPLAYED = pa.field("replayed", pa.int8(), nullable=False)
"""A further column of training splits in such data sets: 1 for a sample of those labels, which train again; else 0."""


def fingerprint(manifest: dict[str, Any]) -> str:
    """A short name of the data set's content: equal exactly when counts and every shard's bytes are equal."""
    content = {name: manifest[name] for name in ("version", "users", "items", "shards")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
