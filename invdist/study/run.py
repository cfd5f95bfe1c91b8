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
from invdist.runtime.files import exclusive, write_atomically
from invdist.runtime.install import installed
from invdist.study import figures, results, sources
from invdist.study.markdown import markdown
from invdist.study.space import Case, Point, cases, identity, resolve
from invdist.study.spec import Study, StudyTable
from invdist.study.stopwatch import Stopwatch
from invdist.study.trial import FAILED, TESTING, TUNING, Trial, remove_checkpoints

Say = Callable[[str], None]


def say_on_screen(line: str) -> None:
    """Prints a line at once. (Ray replaces `print` and cannot pickle the original.)"""
    print(line, flush=True)


def check(study: Study, *, resume: bool = False) -> dict[str, list[Case]]:
    """The cases of every table, all their points validated; raises `UserError` before anything is started."""
    planned = {table.name: cases(study, table) for table in study.tables}
    for table in study.tables:
        if (dataset := sources.check(table)) is not None:
            planned[table.name] = _fitting(study, table, dataset)
    if study.path.exists() and not resume:
        raise UserError(f"{study.path} exists already: continue it with --resume, or choose another name=")
    return planned


def _fitting(study: Study, table: StudyTable, dataset: Dataset) -> list[Case]:
    """The cases of a table with the points that fit its data; `UserError` if no point of any case does."""
    found = cases(study, table, dataset)
    if not any(case.points for case in found):
        raise UserError(f"table {table.name}: no setting fits {dataset.path}: {'; '.join(found[0].left_out)}")
    return found


def run(study: Study, *, resume: bool = False, command: str = "", say: Say = say_on_screen) -> Path:
    """Runs the trials that have no result on the Ray cluster of this process; returns the file of results.

    Raises `Interrupted` on Ctrl-C, after writing the results so far.
    """
    planned = check(study, resume=resume)
    study.path.mkdir(parents=True, exist_ok=True)
    with exclusive(study.path):
        say(f"study {study.name} in {study.path}")
        trials = StudyTrials(study, planned, say)
        try:
            for table in study.tables:
                trials.run_tuning(table)
                trials.run_seeds(table)
                write_results(trials, command)
        finally:
            path = write_results(trials, command)
    return path


def rewrite(study: Study, *, command: str = "", say: Say = say_on_screen) -> Path:
    """Writes the results again from the trial folders, without running anything; returns the file of results."""
    planned = check(study, resume=True)
    if not study.path.exists():
        raise UserError(f"{study.path} does not exist: no trial of the study was run")
    trials = StudyTrials(study, planned, say)
    for table in study.tables:
        trials.add_seeds(table)
    return write_results(trials, command)


class StudyTrials:
    """The trials of a study. Those over seeds are known once the tuning trials of their case have ended.

    Opens or prepares the data set of every table.
    """

    def __init__(self, study: Study, planned: dict[str, list[Case]], say: Say) -> None:
        self.study, self.planned, self._say = study, planned, say
        self.stopwatch = Stopwatch(study.path)
        self.datasets: dict[str, Dataset] = {}
        self._tuning: dict[Case, list[Trial]] = {}
        self._seeds: dict[Case, list[Trial]] = {}
        for table in study.tables:
            dataset = sources.open_source(table.data, table.name, Path(study.cache), say)
            self.datasets[table.name] = dataset
            self.planned[table.name] = _fitting(study, table, dataset)
            for case in self.planned[table.name]:
                for reason in case.left_out:
                    say(f"{table.name}: {case.name}: some settings are left out: {reason}")
                points = case.points if len(case.points) > 1 else ()
                self._tuning[case] = [self._trial(table, case, TUNING, point, study.tuning_seed) for point in points]

    def run_tuning(self, table: StudyTable) -> None:
        """Runs the tuning trials of a table that have no result yet."""
        self._run([trial for case in self.planned[table.name] for trial in self._tuning[case]], "tuning")

    def run_seeds(self, table: StudyTable) -> None:
        """Runs the selected setting of each case over the seeds: the only runs that see test rows."""
        self.add_seeds(table)
        self._run([trial for case in self.planned[table.name] for trial in self._seeds[case]], "seeds")

    def add_seeds(self, table: StudyTable) -> None:
        """Adds the trials over seeds of every case whose setting is known."""
        for case in self.planned[table.name]:
            point = self.selected(case)
            seeds = (table.seeds or self.study.seeds) if point is not None else []
            self._seeds[case] = [self._trial(table, case, TESTING, point or {}, seed) for seed in seeds]

    def selected(self, case: Case) -> Point | None:
        """The setting of a case: the only one, or the best on validation once all tuning trials have ended."""
        if len(case.points) == 1:
            return case.points[0]
        trials = self._tuning[case]
        best = results.select(trials) if all(trial.result is not None for trial in trials) else None
        return best.point if best else None

    @property
    def all(self) -> list[Trial]:
        """All trials known so far."""
        groups = [*self._tuning.values(), *self._seeds.values()]
        return [trial for group in groups for trial in group]

    def rows(self, table: StudyTable) -> list[results.Row]:
        """The rows of a table with the results so far."""
        return [
            results.row(case, [*self._tuning[case], *self._seeds.get(case, [])], self.selected(case))
            for case in self.planned[table.name]
        ]

    def metric(self, table: StudyTable) -> tuple[str, int]:
        """The selection metric of a table, and the cut of NDCG."""
        case = next(case for case in self.planned[table.name] if case.points)
        training = resolve(self.study, table, case, case.points[0], 0, path="-").training
        return training.metric, training.ndcg_k

    def _trial(self, table: StudyTable, case: Case, role: str, point: Point, seed: int) -> Trial:
        dataset = self.datasets[table.name]
        config = resolve(self.study, table, case, point, seed, path=dataset.path, test=role == TESTING)
        if config.exposures.path is None:  # beside the data sets, for all trials of all studies on them
            config.exposures.path = str(Path(self.study.cache).absolute() / "exposure-vectors")
        name = f"{role}-{seed}-{identity(config, dataset.fingerprint)}"
        folder = self.study.path / "trials" / table.name / case.name / name
        return Trial(case, role, seed, point, configs.dump(config), folder)

    def _run(self, trials: Sequence[Trial], what: str) -> None:
        """Runs the trials without a result; one that failed before is run again from its beginning."""
        for trial in trials:
            result = trial.result
            if result is not None and result.status == FAILED:
                shutil.rmtree(trial.folder)
        waiting = [trial for trial in trials if trial.result is None]
        done = [trial for trial in trials if trial.result is not None]
        self._remove_checkpoints(done)  # an interrupted study may not have done it
        if not waiting:
            return
        kept = f", {len(done)} done before" if done else ""
        self._say(f"{waiting[0].case.table}: {len(waiting)} trials, {what}{kept}")
        started, ended = time.monotonic(), 0
        from invdist.study.tuning import run_trials

        def on_end(trial: Trial) -> None:
            nonlocal ended
            ended += 1
            self.stopwatch.note()
            left = int((time.monotonic() - started) / ended * (len(waiting) - ended))
            self._say(f"[{ended}/{len(waiting)}, {left // 60}:{left % 60:02d} left] {_outcome(trial)}")

        with self.stopwatch.running():
            run_trials(
                waiting,
                concurrent=self.study.concurrent,
                stopping=self.study.stopping,
                keep_checkpoints=self.study.keep_tuning_checkpoints,
                scratch=self.study.path,
                gpus=self.study.gpus,
                earlier=done,
                on_end=on_end,
            )
        self._remove_checkpoints(waiting)

    def _remove_checkpoints(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            if trial.role == TUNING and not self.study.keep_tuning_checkpoints:
                remove_checkpoints(trial.folder)


def _outcome(trial: Trial) -> str:
    """One line about a trial that ended."""
    result = trial.result
    assert result is not None
    score = f"valid {result.best:.4f}" if result.best is not None else ""
    if result.test:
        score += f"  test AUC {result.test['auc']:.4f}"
    what = f"{result.status}: {result.reason}" if result.status == FAILED else f"{result.status} {score}"
    setting = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in trial.point.items())
    return f"{trial.case.name} seed {trial.seed}: {what}  {result.epochs} epochs {result.seconds:.0f} s  {setting}"


def write_results(trials: StudyTrials, command: str = "") -> Path:
    """Writes results.parquet, results.md, figures and study.yaml from the trial folders; returns results.md."""
    study = trials.study
    results.write_parquet(study.path / "results.parquet", trials.all, study.path)
    parts = [f"# {study.name}", _provenance(command), *_wall_time(trials)]
    for table in study.tables:
        rows, (metric, k) = trials.rows(table), trials.metric(table)
        parts.append(markdown(study, table, rows, trials.datasets[table.name], metric, k))
        figures.write(study.path / "figures", table.name, rows, k)
    write_atomically(study.path / "study.yaml", to_yaml(to_mapping(study)))
    write_atomically(study.path / "results.md", "\n\n".join(parts) + "\n")
    return study.path / "results.md"


def _provenance(command: str) -> str:
    versions = ", ".join(f"{name} {installed(name)}" for name in ("invdist", "torch", "torchrec", "ray"))
    shown = command or " ".join(sys.argv)
    return f"`{shown}`, {time.strftime('%Y-%m-%d')}; python {platform.python_version()}, {versions}."


def _wall_time(trials: StudyTrials) -> list[str]:
    if not (seconds := trials.stopwatch.seconds):
        return []
    at_once = trials.study.concurrent
    return [f"Trials ran for {seconds / 60:.1f} minutes by the clock, in all sessions, up to {at_once} at a time."]


def plan(planned: dict[str, list[Case]], study: Study) -> list[str]:
    """The trials a study would run, a line per case and per point."""
    lines = []
    for table in study.tables:
        seeds = len(table.seeds or study.seeds)
        for case in planned[table.name]:
            tuning = len(case.points) if len(case.points) > 1 else 0
            runs = f"{tuning} tuning trials, then {seeds} seeds"
            lines.append(f"{table.name}  {case.name}: {runs if case.points else 'none of its settings fits the data'}")
            lines += [f"    {point}" for point in case.points]
            lines += [f"    left out: {reason}" for reason in case.left_out]
    return lines


def cpus(study: Study) -> int:
    """CPUs for a private Ray cluster: one per rank of the concurrent trials, and one for the driver of a group."""
    if study.cpus is not None:
        return study.cpus
    ranks = [int((base.get("ray") or {}).get("workers", 1)) for base in (study.base, *(t.base for t in study.tables))]
    return study.concurrent * max(count + 1 if count > 1 else 1 for count in ranks)
