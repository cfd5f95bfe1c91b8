"""Small prepared data sets that several tests read."""

from __future__ import annotations

from pathlib import Path

import pytest

from invdist.data.prepare.labeling import Labeling
from invdist.data.prepare.options import Options
from invdist.data.prepare.pipeline import prepare
from invdist.data.prepare.synthetic import PRESETS, SyntheticLog

FINISH = Labeling(rules=("finish_rate",))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The synthetic feed of 200 users and 300 items, in many small shards. Not to be changed by a test."""
    path = tmp_path_factory.mktemp("prepared") / "tiny"
    prepare(SyntheticLog("tiny", PRESETS["tiny"], 0), FINISH, Options(shard_rows=300), path)
    return path
