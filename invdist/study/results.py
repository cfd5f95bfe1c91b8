"""The results of a study, from the folders of its trials: one record per trial, one row per case."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from invdist.evaluation.tables import METRICS
from invdist.study.space import Case, Point
from invdist.study.statistics import Spread, spread
from invdist.study.trial import FAILED, FINISHED, STOPPED, TESTING, TUNING, Result, Trial
from invdist.training.history import History


def select(trials: Sequence[Trial]) -> Trial | None:
    """The tuning trial whose validation metric is best, the first of equals; None if all failed.

    It looks at nothing but validation: tuning trials have no test metrics.
    """
    done = [(trial, trial.result) for trial in trials if trial.role == TUNING]
    scored = [(trial, result.best) for trial, result in done if result is not None and result.best is not None]
    return max(scored, key=lambda pair: pair[1])[0] if scored else None


@dataclass(frozen=True)
class Row:
    """What became of one case."""

    case: Case
    point: Point | None
    """The selected setting; None while there is none."""
    tuning: tuple[tuple[Trial, Result | None], ...]
    runs: tuple[tuple[Trial, Result], ...]
    """The runs over seeds that finished."""
    failures: tuple[tuple[Trial, Result], ...]
    """Every trial of the case that failed."""

    def by_seed(self, metric: str) -> dict[int, float]:
        """A test metric of each seed; `annotation_auc` and `rows_per_s` are known, too."""
        values = {
            trial.seed: getattr(result, metric) if hasattr(result, metric) else result.test.get(metric)
            for trial, result in self.runs
        }
        return {seed: value for seed, value in values.items() if value is not None}

    def spread(self, metric: str) -> Spread | None:
        """Mean and deviation of a test metric over seeds."""
        return spread(list(self.by_seed(metric).values()))

    @property
    def directions(self) -> dict[str, int]:
        """Steps that went each way, over all seeds; empty for strategies that choose none."""
        total: dict[str, int] = {}
        for _, result in self.runs:
            for name, count in result.directions.items():
                total[name] = total.get(name, 0) + count
        return total

    def directions_by_epoch(self) -> dict[int, Counter[str]]:
        """The same epoch by epoch, each over the seeds that came so far."""
        total: defaultdict[int, Counter[str]] = defaultdict(Counter)
        for trial, _ in self.runs:
            for epoch in History.read(trial.folder).epochs:
                total[epoch["epoch"]].update(epoch["directions"])
        return {epoch: steps for epoch, steps in sorted(total.items()) if steps.total()}

    @property
    def tried(self) -> str:
        """How many settings were tried and what became of them, for people."""
        if self.case.left_out and not self.case.points:
            return "none fits"
        if not self.tuning:
            return "fixed"
        ended = [result.status if result else "not run" for _, result in self.tuning]
        parts = [f"{len(ended)}"]
        for status in (STOPPED, FAILED, "not run"):
            if ended.count(status):
                parts.append(f"{ended.count(status)} {status}")
        return ", ".join(parts)


def row(case: Case, trials: Sequence[Trial], point: Point | None) -> Row:
    """The row of a case from its trials, tuning ones and those over seeds."""
    ended = [(trial, trial.result) for trial in trials]
    return Row(
        case,
        point,
        tuple((trial, result) for trial, result in ended if trial.role == TUNING),
        tuple((t, r) for t, r in ended if t.role == TESTING and r is not None and r.status == FINISHED),
        tuple((t, r) for t, r in ended if r is not None and r.status == FAILED),
    )


def write_parquet(path: Path, trials: Sequence[Trial], root: Path) -> None:
    """One row per trial that has a result, settings as JSON beside its metrics."""
    records = [_record(trial, result, root) for trial in trials if (result := trial.result) is not None]
    if records:
        columns = dict.fromkeys(key for record in records for key in record)
        table = pa.table({key: pa.array([record.get(key) for record in records]) for key in columns})
        partial = path.with_name(f".{path.name}.partial")
        pq.write_table(table, partial)
        partial.replace(path)


def _record(trial: Trial, result: Result, root: Path) -> dict[str, Any]:
    return {
        "table": trial.case.table,
        "strategy": trial.case.strategy,
        "backbone": trial.case.backbone,
        "variant": json.dumps(dict(trial.case.variant)),
        "role": trial.role,
        "seed": trial.seed,
        "setting": json.dumps(trial.point),
        "status": result.status,
        "reason": result.reason,
        "best_epoch": result.best_epoch,
        "epochs": result.epochs,
        "seconds": result.seconds,
        "rows_per_s": result.rows_per_s,
        "annotation_auc": result.annotation_auc,
        **{f"valid_{name}": result.valid.get(name) for name in METRICS},
        **{f"test_{name}": result.test.get(name) for name in METRICS},
        "run": str(trial.folder.relative_to(root)),
    }
