"""Metrics over ranks against the same rows in one process."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from invdist.evaluation import distributed
from invdist.evaluation.distributed import distributed_metrics
from invdist.evaluation.metrics import ranking_metrics
from invdist.runtime.errors import UserError
from tests.distributed import run_ranks

WORLD = 3


def rows_of(case: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    rows = 40_000
    user = random.integers(900, size=rows)
    label = (random.random(rows) < 0.3).astype(np.int8)
    score = random.normal(size=rows) + label
    if case == "ties":
        score = np.round(score) * 0.25 * (-1.0) ** (label % 2)
    if case == "one value in most rows":
        score[random.random(rows) < 0.7] = 0.0
        score[random.random(rows) < 0.1] = -0.0
    if case == "a rank without rows":
        user = user // WORLD * WORLD + user % 2
    if case == "all rows on one rank":
        user = user * WORLD + 1
    if case == "few rows":
        user, label, score = np.array([0, 0, 1]), np.array([0, 1, 0]), np.array([0.5, 0.5, -1.0])
    if case == "one class":
        label[:] = 1
    if case == "float32":
        score = score.astype(np.float32)
    return user, label, score


CASES = (
    *("continuous", "ties", "one value in most rows", "a rank without rows"),
    *("all rows on one rank", "few rows", "float32"),
)


def _evaluate_all(rank: int, world_size: int) -> dict[str, dict[str, float | int] | str]:
    """Every case of this file in one process group: starting processes is most of the cost."""

    def evaluate(case: str, exact_rows: int = 10**6) -> dict[str, float | int]:
        user, label, score = rows_of(case)
        mine = user % world_size == rank
        return distributed_metrics(user[mine], label[mine], score[mine], k=5, exact_rows=exact_rows)

    results: dict[str, dict[str, float | int] | str] = {case: evaluate(case) for case in CASES}
    for case in ("continuous", "one value in most rows", "ties"):
        results[f"histogram: {case}"] = evaluate(case, exact_rows=1000)
    distributed._BINS = 50
    for case in ("continuous", "one value in most rows", "a rank without rows", "few rows"):
        results[f"coarse histogram: {case}"] = evaluate(case, exact_rows=1)

    user, label, score = rows_of("continuous")
    mine = user % world_size == rank
    bad = score.copy()
    bad[np.flatnonzero(user % WORLD == 1)[4]] = np.nan
    for name, rows in {
        "NaN on rank 1": (user[mine], label[mine], bad[mine]),
        "misplaced": (user[mine] + (rank == 2), label[mine], score[mine]),
        "one class": (user[mine], np.ones(mine.sum()), score[mine]),
        "empty": (user[:0], label[:0], score[:0]),
    }.items():
        try:
            distributed_metrics(*rows)
        except UserError as error:
            results[name] = str(error)
    return results


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, dict[str, float | int] | str]]:
    return run_ranks(_evaluate_all, WORLD)


def test_every_rank_gets_the_same(by_rank: list[dict]) -> None:
    assert by_rank[0] == by_rank[1] == by_rank[2]
    assert len(by_rank[0]) == len(CASES) + 3 + 4 + 4


@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(by_rank: list[dict], case: str) -> None:
    got = by_rank[0][case]
    user, label, score = rows_of(case)
    expected = ranking_metrics(user, label, score, k=5)
    assert got == pytest.approx(expected, abs=1e-12)
    assert got["auc"] == expected["auc"]
    assert got["auc"] == pytest.approx(roc_auc_score(label, score), abs=1e-12)


@pytest.mark.parametrize("case", ["continuous", "one value in most rows", "a rank without rows", "few rows"])
def test_coarse_histogram_keeps_its_bound(by_rank: list[dict], case: str) -> None:
    got = by_rank[0][f"coarse histogram: {case}"]
    bound = got.get("auc_error_bound", 0.0)
    assert abs(got["auc"] - roc_auc_score(*rows_of(case)[1:])) <= bound + 1e-12
    assert bound < 0.02
    if case == "continuous":
        assert bound > 0


def test_histogram_is_exact_where_scores_repeat(by_rank: list[dict]) -> None:
    assert "auc_error_bound" not in by_rank[0]["histogram: ties"]
    for case in ("continuous", "one value in most rows", "ties"):
        got = by_rank[0][f"histogram: {case}"]
        bound = got.get("auc_error_bound", 0.0)
        assert got["auc"] == pytest.approx(roc_auc_score(*rows_of(case)[1:]), abs=1e-12 + bound)
        assert bound < 1e-5
        # Everything else does not go through the histogram.
        assert got["gauc"] == by_rank[0][case]["gauc"]


def test_bad_rows_on_one_rank_stop_all_of_them_with_the_reason(by_rank: list[dict]) -> None:
    for result in by_rank:
        assert "rank 1 of 3" in result["NaN on rank 1"]
        assert "score of row 4 is nan" in result["NaN on rank 1"]
        assert "rank 2 of 3" in result["misplaced"]
        assert "all 40000 rows are labeled 1" in result["one class"]
        assert "no rows" in result["empty"]
