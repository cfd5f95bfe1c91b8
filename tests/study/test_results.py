"""Selection on validation alone, and the table that people read."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from invdist.evaluation.tables import METRICS
from invdist.study import results
from invdist.study.markdown import ahead, markdown
from invdist.study.space import Case
from invdist.study.spec import load
from invdist.study.trial import Result, Trial
from tests.study.specs import tiny, written


def _trial(folder: Path, strategy: str, role: str, seed: int, result: Result | None, **point: object) -> Trial:
    case = Case("feed", strategy, "gmf")
    name = f"{strategy}-{role}-{seed}-{'-'.join(map(str, point.values()))}"
    trial = Trial(case, role, seed, dict(point), "", folder / name)
    if result is not None:
        result.write(trial.folder)
    return trial


def _dataset(rows: dict[str, int]) -> Any:
    return SimpleNamespace(users=2, items=3, rows=rows, fingerprint="f")


def test_selection_looks_at_validation_and_nothing_else(tmp_path: Path):
    def tuned(gamma: float, best: float | None, test: float, status: str = "finished") -> Trial:
        ended = Result(status=status, best=best, test={"auc": test})
        return _trial(tmp_path, "ig", "tuning", 9, ended, gamma=gamma)

    low = tuned(0.1, 0.70, test=0.99)
    high = tuned(0.2, 0.71, test=0.10)
    failed = tuned(0.3, None, test=1.0, status="failed")
    unfinished = _trial(tmp_path, "ig", "tuning", 9, None, gamma=0.4)
    assert results.select([low, high, failed, unfinished]) is high
    assert results.select([failed]) is None


def _row(folder: Path, strategy: str, values: list[float], *extra: Trial) -> results.Row:
    """A row whose seeds 0, 1, ... have these test metrics."""
    runs = [
        _trial(folder, strategy, "seed", seed, Result(status="finished", best=v, test=dict.fromkeys(METRICS, v)))
        for seed, v in enumerate(values)
    ]
    return results.row(Case("feed", strategy, "gmf"), [*runs, *extra], {"optimizer.gamma": 0.01})


def test_rows_with_other_seeds_are_not_tested_against_each_other(tmp_path: Path):
    """Of the seeds that both have, the second is ahead: the means are of different seeds."""
    rows = [_row(tmp_path, "none", [0.800, 0.800, 0.801]), _row(tmp_path, "ig", [0.810, 0.812, 0.811, 0.600])]
    said = ahead("On gmf", rows, "auc", 10)
    assert said is not None
    assert "0.8003, ahead of ig on gmf 0.7583 by 0.0421 AUC (not tested: their seeds differ)" in said
    rows[1] = _row(tmp_path, "dns", [0.810, 0.812, 0.811])
    assert "significant at 0.05" in (ahead("On gmf", rows, "auc", 10) or "")


def test_the_table_shows_spread_floor_failures_and_who_is_ahead(tmp_path: Path):
    study = load(written(tiny(tmp_path), tmp_path))

    broken = _trial(tmp_path, "none", "tuning", 9, Result(status="failed", reason="out of luck"), gamma=9)
    rows = [
        _row(tmp_path, "none", [0.60, 0.62], broken),
        _row(tmp_path, "ig", [0.70, 0.72]),
        _row(tmp_path, "means", [0.65, 0.65]),
    ]
    text = markdown(study, study.tables[0], rows, _dataset({"train": 4}), "auc", 10)
    assert "| none | gmf | 0.6100 ± 0.0141 |" in text
    assert "| ig | gmf | **0.7100 ± 0.0141** |" in text
    assert "| means | - |" in text
    assert "labels |" not in text  # trials from before have no AUC of users with few labels
    assert "0.7000 / 0.6000 / 0.5000" in text  # published
    assert "On gmf: **ig on gmf** 0.7100, ahead of means 0.6500 by 0.0600 AUC, paired t-test over 2 seeds" in text
    assert "1, 1 failed" in text
    assert "out of luck" in text
    assert "`optimizer.gamma=0.01`" in text


def test_compared_settings_have_the_directions_of_their_epochs_over_seeds(tmp_path: Path):
    study = load(written(tiny(tmp_path), tmp_path))
    by_seed = [[{"direct": 4}, {"direct": 1, "pass": 3}], [{"direct": 2, "inverse": 2}]]
    runs = []
    for seed, epochs in enumerate(by_seed):
        result = Result(status="finished", best=0.7, test={"auc": 0.7}, directions={"direct": 1}, seconds=45.0)
        runs.append(_trial(tmp_path, "ig", "seed", seed, result))
        events = [{"event": "epoch", "epoch": number, "directions": way} for number, way in enumerate(epochs)]
        (runs[-1].folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    row = results.row(Case("feed", "ig", "gmf", (("ig.alpha_ratio", 10),)), runs, {})
    text = markdown(study, study.tables[0], [row], _dataset({}), "auc", 10)
    assert "2 trials, 1.5 minutes of training, all trials summed." in text
    assert "| direct / pass / inverse in epoch | 0 | 1 |" in text
    assert "| ig, alpha_ratio 10 on gmf | 75% / 0% / 25% | 25% / 75% / 0% |" in text
