"""The data set that benchmarks train on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from invdist.data.prepare.options import build_options
from invdist.data.prepare.pipeline import prepare_log

# Labeled interactions, users and items of MovieLens-1M.
_LIKE_MOVIELENS = {"preset": "small", "users": 6_040, "items": 3_706, "labeled_rows": 1_000_209, "label_fraction": 1.0}


def movielens_or_like(given: str | None, folder: Path) -> tuple[str, str]:
    """A prepared data set and what it is: the one given, MovieLens-1M of `INVDIST_DATA`, or one of its size."""
    if given:
        return given, given
    zipped = Path(os.environ.get("INVDIST_DATA", "")) / "ml-1m.zip"
    kind, options, inputs, name = ("ml-1m", {}, [zipped], "MovieLens-1M")
    if not zipped.is_file():
        kind, options, inputs, name = ("synthetic", _LIKE_MOVIELENS, [], "a generated log of the size of MovieLens-1M")
    return prepared(kind, options, inputs, folder / "data"), name


def prepared(kind: str, options: dict[str, Any], inputs: list[Path], path: Path) -> str:
    """A data set prepared as `invdist prepare` does."""
    prepare_log(build_options(kind, options), inputs, str(path))
    return str(path)
