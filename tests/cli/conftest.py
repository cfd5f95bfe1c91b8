"""What the tests of commands over one trained run share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from invdist.data.dataset import Dataset
from tests.runs import scores_of_training


@pytest.fixture(scope="session")
def every_score(trained_run: Path, tiny_data: Path) -> np.ndarray:
    """Scores of all pairs `[users, items]`, by the strategy that was trained."""
    dataset = Dataset.open(str(tiny_data))
    pairs = np.divmod(np.arange(dataset.users * dataset.items), dataset.items)
    return scores_of_training(trained_run, *pairs).reshape(dataset.users, dataset.items)
