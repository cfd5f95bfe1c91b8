"""The results of a study, read from the folders of its trials: one record per trial, one row per case."""

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
from invdist.runtime.files import replacing
from invdist.study.space import Case, Point
from invdist.study.statistics import Spread, spread
from invdist.study.trial import FAILED, FINISHED, STOPPED, TESTING, TUNING, Result, Trial
from invdist.training.history import History


def select(trials: Sequence[Trial]) -> Trial | None:
    """The tuning trial whose validation metric is best, the first of equals; None if all failed.

    Only validation counts: tuning trials have no test metrics.
    """
    ended = [(trial, trial.result) for trial in trials if trial.role == TUNING]
    scored = [(trial, result.best) for trial, result in ended if result is not None and result.best is not None]
    return max(scored, key=lambda pair: pair[1])[0] if scored else None


@dataclass(frozen=True)
class Row:
    """The results of one case."""

    case: Case
    point: Point | None
    """The selected setting; None while there is none."""
    tuning: tuple[tuple[Trial, Result | None], ...]
    runs: tuple[tuple[Trial, Result], ...]
    """The runs over seeds that finished."""
    failures: tuple[tuple[Trial, Result], ...]
    """Every trial of the case that failed."""

    @property
    def title(self) -> str:
        """The case for people: `ig on gmf`."""
        return self.case.label if self.case.backbone == "-" else f"{self.case.label} on {self.case.backbone}"

    def by_seed(self, metric: str) -> dict[int, float]:
        """A test metric, `annotation_auc` or `rows_per_s` of each seed."""
        values = {
            trial.seed: getattr(result, metric) if hasattr(result, metric) else result.test.get(metric)
            for trial, result in self.runs
        }
        return {seed: value for seed, value in values.items() if value is not None}

    def spread(self, metric: str) -> Spread | None:
        """Mean and deviation of such a metric over seeds."""
        return spread(list(self.by_seed(metric).values()))

    @property
    def directions(self) -> Counter[str]:
        """Steps in each direction, over all seeds; empty for strategies that choose none."""
        total: Counter[str] = Counter()
        for _, result in self.runs:
            total.update(result.directions)
        return total

    def directions_by_epoch(self) -> dict[int, Counter[str]]:
        """The same for each epoch, over the seeds that reached it."""
        total: defaultdict[int, Counter[str]] = defaultdict(Counter)
        for trial, _ in self.runs:
            for epoch in History.read(trial.folder).epochs:
                total[epoch["epoch"]].update(epoch["directions"])
        return {epoch: steps for epoch, steps in sorted(total.items()) if steps.total()}

    @property
    def tried(self) -> str:
        """How many settings were tried and how they ended, for people: `8, 3 stopped early`."""
        if self.case.left_out and not self.case.points:
            return "none fits"
        if not self.tuning:
            return "fixed"
        ended = Counter(result.status if result else "not run" for _, result in self.tuning)
        shown = [f"{ended[status]} {status}" for status in (STOPPED, FAILED, "not run") if ended[status]]
        return ", ".join([str(ended.total()), *shown])


def row(case: Case, trials: Sequence[Trial], point: Point | None) -> Row:
    """The row of a case from its trials, for tuning and over seeds."""
    ended = [(trial, trial.result) for trial in trials]
    return Row(
        case,
        point,
        tuple((trial, result) for trial, result in ended if trial.role == TUNING),
        tuple((t, r) for t, r in ended if t.role == TESTING and r is not None and r.status == FINISHED),
        tuple((t, r) for t, r in ended if r is not None and r.status == FAILED),
    )


def write_parquet(path: Path, trials: Sequence[Trial], root: Path) -> None:
    """Writes a row for each trial that has a result: settings as JSON, and its metrics."""
    records = [_record(trial, result, root) for trial in trials if (result := trial.result) is not None]
    if records:
        with replacing(path) as unfinished:
            pq.write_table(pa.Table.from_pylist(records), unfinished)


def _record(trial: Trial, result: Result, root: Path) -> dict[str, Any]:
    copied = ("status", "reason", "best_epoch", "epochs", "seconds", "rows_per_s", "annotation_auc")
    return {
        "table": trial.case.table,
        "strategy": trial.case.strategy,
        "backbone": trial.case.backbone,
        "variant": json.dumps(dict(trial.case.variant)),
        "role": trial.role,
        "seed": trial.seed,
        "setting": json.dumps(trial.point),
        **{name: getattr(result, name) for name in copied},
        **{f"valid_{name}": result.valid.get(name) for name in METRICS},
        **{f"test_{name}": result.test.get(name) for name in (*METRICS, "auc_few")},
        "run": str(trial.folder.relative_to(root)),
    }
