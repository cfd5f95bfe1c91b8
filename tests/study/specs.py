"""A tiny study on a generated feed, for the tests of studies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from invdist.config.plain_yaml import to_yaml


def tiny(folder: Path, **changes: Any) -> dict[str, Any]:
    """The mapping of a study of two strategies, two settings each, two seeds, on 200 users x 300 items."""
    return {
        "name": "tiny",
        "folder": str(folder / "studies"),
        "cache": str(folder / "cache"),
        "strategies": ["none", "ig"],
        "seeds": [0, 1],
        "trials": 2,
        "base": {"training": {"epochs": 3, "patience": 2}, "checkpoint": {"keep_last": 1}},
        "space": [
            {"choices": {"optimizer.gamma": [0.001, 0.01]}},
            {"strategies": ["ig"], "choices": {"ig.alpha_ratio": [1, 10], "unlabeled.rate": [2]}},
        ],
        "tables": [
            {
                "name": "feed",
                "data": {"prepare": {"kind": "synthetic", "options": {"preset": "tiny"}}},
                "published": {"gmf": {"none": [0.7, 0.6, 0.5]}},
            }
        ],
        **changes,
    }


def written(mapping: dict[str, Any], folder: Path) -> Path:
    """The mapping as a YAML file."""
    path = folder / "study.yaml"
    path.write_text(to_yaml(mapping))
    return path
