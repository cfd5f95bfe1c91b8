"""The data sets of recipes: prepared once, and again when what they are made of is another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from invdist.data.prepare import pipeline
from invdist.study import sources
from invdist.study.spec import Recipe, Source


def opened(folder: Path) -> tuple[Path, bool]:
    """Where the data set of a recipe is, and whether it was prepared for this call."""
    source = Source(prepare=Recipe(kind="ratings", input=[str(folder / "log.csv")]))
    said: list[str] = []
    return Path(sources.open_source(source, "table", folder / "cache", said.append).path), bool(said)


def test_a_recipe_is_carried_out_again_for_other_files_and_other_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = tmp_path / "log.csv"
    lines = [f"{user},{item},{1 + (user + item) % 5},{user}\n" for user in range(20) for item in range(20)]
    log.write_text("user,item,rating,time\n" + "".join(lines))
    first, prepared = opened(tmp_path)
    assert prepared
    assert opened(tmp_path) == (first, False)

    os.utime(log, (1, 1))
    touched, prepared = opened(tmp_path)
    assert prepared
    assert touched != first
    monkeypatch.setattr(sources, "RULES", pipeline.RULES + 1)
    assert opened(tmp_path)[0] not in (first, touched)
