"""A study from its spec to its tables: check everything, tune, select on validation, run over seeds, report."""

from __future__ import annotations

import platform
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from invdist import config as configs
from invdist.config.fields import to_mapping
from invdist.config.plain_yaml import to_yaml
from invdist.data.dataset import Dataset
from invdist.runtime.errors import UserError
from invdist.runtime.files import exclusive
from invdist.runtime.install import installed
from invdist.study import figures, results, sources, tables
from invdist.study.results import Row
from invdist.study.space import Case, Point, cases, identity, resolve
from invdist.study.spec import Study, Table
from invdist.study.trial import FAILED, TESTING, TUNING, Trial, forget_weights
from invdist.training.run_folder import write_atomically

Say = Callable[[str], None]


def say_on_screen(line: str) -> None:
    """Prints a line at once. (Not `print` itself: Ray replaces that one, and then cannot pickle the first.)"""
    print(line, flush=True)


def check(study: Study, *, resume: bool = False) -> dict[str, list[Case]]:
    """The cases of every table, every point validated; `UserError` before anything is started."""
    planned = {table.name: cases(study, table) for table in study.tables}
    for table in study.tables:
        if (dataset := sources.check(table)) is not None:
            planned[table.name] = _fitting(study, table, dataset)
    if study.path.exists() and not resume:
        raise UserError(f"{study.path} exists already: continue it with --resume, or choose another name=")
    return planned


def _fitting(study: Study, table: Table, dataset: Dataset) -> list[Case]:
    """The cases of a table with the points that fit its data; `UserError` if none of any does."""
    found = cases(study, table, dataset)
    if not any(case.points for case in found):
        raise UserError(f"table {table.name}: no setting fits {dataset.path}: {'; '.join(found[0].left_out)}")
    return found


def run(study: Study, *, resume: bool = False, command: str = "", say: Say = say_on_screen) -> Path:
    """Runs what is not done yet on the Ray this process is connected to, and writes the results; gives their file.

    Raises `Interrupted` on Ctrl-C, with the results so far written.
    """
    planned = check(study, resume=resume)
    study.path.mkdir(parents=True, exist_ok=True)
    with exclusive(study.path):
        say(f"study {study.name} in {study.path}")
        work = Work(study, planned, say)
        work.open_data()
        try:
            for table in study.tables:
                work.tune(table)
                work.test(table)
                report(work, command)
        finally:
            path = report(work, command)
    return path


class Work:
    """The trials of a study, as far as they are known: those over seeds follow from the tuning ones."""

    def __init__(self, study: Study, planned: dict[str, list[Case]], say: Say) -> None:
        self.study, self.planned, self._say = study, planned, say
        self.datasets: dict[str, Dataset] = {}
        self._tuning: dict[Case, list[Trial]] = {}
        self._testing: dict[Case, list[Trial]] = {}
        self._started, self._ended = time.monotonic(), 0

    def open_data(self) -> None:
        """Opens or prepares every table's data set, and names all tuning trials."""
        for table in self.study.tables:
            dataset = sources.open_source(table.data, table.name, Path(self.study.cache), self._say)
            self.datasets[table.name] = dataset
            self.planned[table.name] = _fitting(self.study, table, dataset)
            for case in self.planned[table.name]:
                for reason in case.left_out:
                    self._say(f"{table.name}: {case.name} goes without some settings: {reason}")
                self._tuning[case] = (
                    [self._trial(table, case, TUNING, point, self.study.tuning_seed) for point in case.points]
                    if len(case.points) > 1
                    else []
                )

    def tune(self, table: Table) -> None:
        """Runs the tuning trials of a table that have no result yet."""
        self._run([trial for case in self.planned[table.name] for trial in self._tuning[case]], "tuning")

    def test(self, table: Table) -> None:
        """Runs the selected setting of each case over the seeds; the only runs that see test rows."""
        self.name_tests(table)
        self._run([trial for case in self.planned[table.name] for trial in self._testing[case]], "seeds")

    def name_tests(self, table: Table) -> None:
        """Names the runs over seeds of every case whose setting is known."""
        for case in self.planned[table.name]:
            point = self.selected(case)
            seeds = (table.seeds or self.study.seeds) if point is not None else []
            self._testing[case] = [self._trial(table, case, TESTING, point or {}, seed) for seed in seeds]

    def selected(self, case: Case) -> Point | None:
        """The setting of a case: the only one, or the best on validation once all trials have ended."""
        if len(case.points) == 1:
            return case.points[0]
        trials = self._tuning[case]
        if any(trial.result is None for trial in trials):
            return None
        best = results.select(trials)
        return best.point if best else None

    @property
    def trials(self) -> list[Trial]:
        """All trials known so far."""
        groups = [*self._tuning.values(), *self._testing.values()]
        return [trial for group in groups for trial in group]

    def rows(self, table: Table) -> list[Row]:
        """The rows of a table as things stand."""
        return [
            results.row(case, [*self._tuning[case], *self._testing.get(case, [])], self.selected(case))
            for case in self.planned[table.name]
        ]

    def metric(self, table: Table) -> tuple[str, int]:
        """The selection metric of a table, and where NDCG is cut."""
        case = next(case for case in self.planned[table.name] if case.points)
        training = resolve(self.study, table, case, case.points[0], 0, path="-").training
        return training.metric, training.ndcg_k

    def _trial(self, table: Table, case: Case, role: str, point: Point, seed: int) -> Trial:
        dataset = self.datasets[table.name]
        config = resolve(self.study, table, case, point, seed, path=dataset.path, test=role == TESTING)
        name = f"{role}-{seed}-{identity(config, dataset.fingerprint)}"
        folder = self.study.path / "trials" / table.name / case.name / name
        return Trial(case, role, seed, point, configs.dump(config), folder)

    def _run(self, trials: Sequence[Trial], what: str) -> None:
        """Runs what has no result; a trial that failed before is tried again from its beginning."""
        for trial in trials:
            result = trial.result
            if result is not None and result.status == FAILED:
                shutil.rmtree(trial.folder)
        waiting = [trial for trial in trials if trial.result is None]
        done = [trial for trial in trials if trial.result is not None]
        self._forget_weights(done)  # an interrupted study may not have come to it
        if not waiting:
            return
        kept = f", {len(done)} done before" if done else ""
        self._say(f"{waiting[0].case.table}: {len(waiting)} trials, {what}{kept}")
        self._started, self._ended = time.monotonic(), 0
        from invdist.study.tuning import run_trials

        study = self.study
        run_trials(
            waiting,
            concurrent=study.concurrent,
            stopping=study.stopping,
            keep_checkpoints=study.keep_tuning_checkpoints,
            scratch=study.path,
            gpus=study.gpus,
            earlier=done,
            on_end=lambda trial: self._tell(trial, len(waiting)),
        )
        self._forget_weights(waiting)

    def _forget_weights(self, trials: Sequence[Trial]) -> None:
        if not self.study.keep_tuning_checkpoints:
            for trial in trials:
                if trial.role == TUNING:
                    forget_weights(trial.folder)

    def _tell(self, trial: Trial, of: int) -> None:
        """One line per trial that ended, with how long the rest may take."""
        self._ended += 1
        result = trial.result
        assert result is not None
        left = (time.monotonic() - self._started) / self._ended * (of - self._ended)
        score = f"valid {result.best:.4f}" if result.best is not None else ""
        if result.test:
            score += f"  test AUC {result.test['auc']:.4f}"
        what = f"{result.status}: {result.reason}" if result.status == FAILED else f"{result.status} {score}"
        setting = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in trial.point.items())
        self._say(
            f"[{self._ended}/{of}, {int(left) // 60}:{int(left) % 60:02d} left] {trial.case.name} seed {trial.seed}: "
            f"{what}  {result.epochs} epochs {result.seconds:.0f} s  {setting}"
        )


def rewrite(study: Study, *, command: str = "", say: Say = say_on_screen) -> Path:
    """Writes the results again from what the trial folders hold, without running anything; gives their file."""
    planned = check(study, resume=True)
    if not study.path.exists():
        raise UserError(f"{study.path} is not there: nothing of the study was run")
    work = Work(study, planned, say)
    work.open_data()
    for table in study.tables:
        work.name_tests(table)
    return report(work, command)


def report(work: Work, command: str = "") -> Path:
    """Writes results.parquet, results.md and figures from what the trial folders hold; gives results.md."""
    study = work.study
    results.write_parquet(study.path / "results.parquet", work.trials, study.path)
    parts = [f"# {study.name}", _provenance(command)]
    for table in study.tables:
        rows, (metric, k) = work.rows(table), work.metric(table)
        dataset = work.datasets[table.name]
        described = {
            "users": dataset.users,
            "items": dataset.items,
            "rows": dataset.rows,
            "fingerprint": dataset.fingerprint,
        }
        parts.append(tables.markdown(study, table, rows, described, metric, k))
        figures.write(study.path / "figures", table.name, rows, k)
    write_atomically(study.path / "study.yaml", to_yaml(to_mapping(study)))
    write_atomically(study.path / "results.md", "\n\n".join(parts) + "\n")
    return study.path / "results.md"


def _provenance(command: str) -> str:
    versions = ", ".join(f"{name} {installed(name)}" for name in ("invdist", "torch", "torchrec", "ray"))
    shown = command or " ".join(sys.argv)
    return f"`{shown}`, {time.strftime('%Y-%m-%d')}; python {platform.python_version()}, {versions}."


def plan(planned: dict[str, list[Case]], study: Study) -> list[str]:
    """The trials a study would run, one line per case."""
    lines = []
    for table in study.tables:
        seeds = len(table.seeds or study.seeds)
        for case in planned[table.name]:
            tuning = len(case.points) if len(case.points) > 1 else 0
            what = (
                f"{tuning} tuning trials, then {seeds} seeds" if case.points else "none of its settings fits the data"
            )
            lines.append(f"{table.name}  {case.name}: {what}")
            lines += [f"    {point}" for point in case.points]
            lines += [f"    left out: {reason}" for reason in case.left_out]
    return lines


def cpus(study: Study) -> int:
    """CPUs that a Ray of the study's own needs: one per rank of the trials at once, and for the driver of a group."""
    if study.cpus is not None:
        return study.cpus
    workers = [study.base, *(table.base for table in study.tables)]
    ranks = [int((base.get("ray") or {}).get("workers", 1)) for base in workers]
    return study.concurrent * max(count + 1 if count > 1 else 1 for count in ranks)
