"""Runs of several kinds, trained once for all tests of serving."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runs import train_here

KINDS = {
    "gmf": (),
    "neumf": ("method=none", "model=neumf", "rows.bias=true", "training.epochs=1", "tower.dropout=0.3"),
    "vectors": ("exposures.vectors=true", "exposures.dim=12", "exposures.learned=16"),
    "neumf vectors": ("method=none", "model=neumf", "training.epochs=1", "exposures.vectors=true"),
    "means": ("method=means", "training.epochs=1"),
}


@pytest.fixture(scope="session")
def run_of(trained_run: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run folder of a kind, trained when it is first asked for."""
    made = {"gmf": trained_run}

    def give(kind: str) -> Path:
        if kind not in made:
            made[kind] = train_here(tiny_data, tmp_path_factory.mktemp("runs") / kind, *KINDS[kind])
        return made[kind]

    return give
