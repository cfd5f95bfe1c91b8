"""Prepared data sets as tests look at them."""

from __future__ import annotations

import hashlib

from invdist.data.dataset import Dataset
from invdist.data.schema import SPLITS


def digest_of_rows(dataset: Dataset) -> str:
    """Of every row in its order, and of nothing else: a fingerprint is of files, so also of what wrote them."""
    digest = hashlib.sha256()
    for split in SPLITS:
        table = dataset.read(split)
        for column in table.column_names:
            digest.update(table[column].to_numpy().astype("<i4").tobytes())
    return digest.hexdigest()[:16]
