"""A pair has the same score, to the bit, whatever is scored with it and by however many threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from invdist.models.frozen import TILE
from invdist.serving.run import open_run
from invdist.serving.scoring import logits
from invdist.serving.topk import TopK
from tests.serving.conftest import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_scores_do_not_depend_on_what_is_scored_with_them(run_of: Callable[[str], Path], kind: str) -> None:
    model = open_run(run_of(kind)).model
    rng = np.random.default_rng(0)
    user, item = (rng.integers(0, len(table), 20_000) for table in (model.user, model.item))
    expected = logits(model, user, item)
    for size in (1, 2, 3, 7, 15, 100, 101, TILE - 1, TILE, TILE + 1, 1000, 9001):
        start = int(rng.integers(0, len(user) - size))
        part = slice(start, start + size)
        np.testing.assert_array_equal(logits(model, user[part], item[part]), expected[part])
    order = rng.permutation(len(user))
    np.testing.assert_array_equal(logits(model, user[order], item[order]), expected[order])
    threads = torch.get_num_threads()
    try:
        for other in (1, 3):
            torch.set_num_threads(other)
            np.testing.assert_array_equal(logits(model, user, item), expected)
            assert torch.get_num_threads() == other
    finally:
        torch.set_num_threads(threads)
    for best in TopK(model, 5).of(np.arange(30)):
        np.testing.assert_array_equal(logits(model, best.user, best.item), best.score)


def test_no_pairs_have_no_scores(trained_run: Path) -> None:
    nothing = np.empty(0, np.int64)
    assert logits(open_run(trained_run).model, nothing, nothing).shape == (0,)
