"""Trials on Ray Tune: several at once, with ASHA among the trials of one case.

A trial of one rank is trained in the process that Tune gives it, on a CPU or a GPU. For several ranks that process
only starts a Ray Train job, whose workers reserve their own resources.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Read by Ray when it is imported: trials keep their own records, and Tune's would be a second set.
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")

from ray import tune
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, TrialScheduler

from invdist import config as configs
from invdist.runtime.errors import UserError
from invdist.study import trial as trials_module
from invdist.study.spec import Stopping
from invdist.study.trial import STOPPED, TUNING, Result, Trial, epoch_metrics, result_of
from invdist.training.history import METRICS_FILE, Tail
from invdist.training.ray_backend import cluster_uses_cuda
from invdist.training.run_folder import STOP_FILE

METRIC = "best"
_EPOCH = "training_iteration"
_CHECK_S = 0.5
"""Seconds between two checks for epochs that a group has finished."""


class Interrupted(Exception):
    """The study was interrupted; finished trials are kept."""


def run_trials(
    trials: Sequence[Trial],
    *,
    concurrent: int,
    stopping: Stopping,
    keep_checkpoints: bool,
    scratch: Path,
    gpus: float,
    earlier: Sequence[Trial] = (),
    on_end: Callable[[Trial], None] = lambda trial: None,
) -> None:
    """Runs trials; returns when every one has a result, raises `Interrupted` on Ctrl-C.

    A trial of one rank gets a CPU, and `gpus` GPUs if the cluster has any. `earlier` are tuning trials that have a
    result from an earlier call: trials of the same case are compared with them.
    """
    if not trials:
        return
    by_folder = {str(trial.folder): trial for trial in trials}
    ended: list[Trial] = []

    def end(trial: Trial) -> None:
        ended.append(trial)
        if trial.result is not None:
            on_end(trial)

    settings = [(trial, configs.from_text(trial.config)) for trial in trials]
    payloads = [
        {
            "case": f"{trial.case.table}/{trial.case.name}",
            "folder": str(trial.folder),
            "config": trial.config,
            "keep": keep_checkpoints or trial.role != TUNING,
            "ranks": config.ray.ranks,
            "cuda": cluster_uses_cuda(config),
        }
        for trial, config in settings
    ]
    epochs = max(config.training.epochs for _, config in settings)
    scheduler = FairStopping(epochs, stopping) if trials[0].role == TUNING else FIFOScheduler()
    if isinstance(scheduler, FairStopping):
        for trial in earlier:
            scheduler.remember(trial)
    tuner = tune.Tuner(
        tune.with_resources(_train, lambda config: _resources(config["trial"], gpus)),
        param_space={"trial": tune.grid_search(payloads)},
        tune_config=tune.TuneConfig(
            scheduler=scheduler,
            max_concurrent_trials=concurrent,
            reuse_actors=True,
            # No metric here: with one, Tune ends the whole study if a trial fails before its first epoch.
            trial_dirname_creator=lambda trial: trial.trial_id,
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(scratch),
            verbose=0,
            callbacks=[_Watch(by_folder, end)],
            # An exception in a trial is its result: only a process that died is tried again.
            failure_config=tune.FailureConfig(max_failures=2),
        ),
    )
    # It warns that it cannot read its own records, which are turned off.
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    try:
        tuner.fit()
    finally:
        # Everything that a study needs is in the folders of its trials.
        shutil.rmtree(scratch / "tune", ignore_errors=True)
    lost = [trial for trial in ended if trial.result is None]
    if lost:
        raise UserError(
            f"{len(lost)} trials ended without a result, such as {lost[0].folder}: the study's folder must be on a "
            "disk that all nodes share (folder=/mnt/shared/studies)"
        )
    if any(trial.result is None for trial in trials):
        raise Interrupted


def _resources(payload: dict[str, Any], gpus: float) -> tune.PlacementGroupFactory:
    """What Tune reserves for a trial. The driver of a group needs almost nothing, but Tune does not accept nothing."""
    if payload["ranks"] > 1:
        return tune.PlacementGroupFactory([{"CPU": 0.01}])
    return tune.PlacementGroupFactory([{"CPU": 1.0, **({"GPU": gpus} if payload["cuda"] else {})}])


def _train(config: dict[str, Any]) -> None:
    """What Tune runs for a trial, in a process that may have run other trials."""
    payload = config["trial"]
    text, folder = payload["config"], Path(payload["folder"])
    metric = configs.from_text(text).training.metric
    best = float("-inf")

    def report(value: float) -> None:
        nonlocal best
        best = max(best, value)
        tune.report({METRIC: best})

    earlier = epoch_metrics(folder, metric)  # of a trial that continues
    for value in earlier:
        report(value)
    tail, done = Tail(folder / METRICS_FILE), len(earlier)

    def report_new() -> None:
        nonlocal done
        for event in tail.new():
            # An epoch is repeated if the trial was killed before its checkpoint was complete.
            if event["event"] == "epoch" and event["epoch"] >= done:
                done += 1
                report(event["valid"][metric])

    if payload["ranks"] == 1:
        trials_module.run(text, folder, payload["keep"], report_new, cuda=payload["cuda"])
        return
    group = threading.Thread(target=trials_module.run_on_group, args=(text, folder, payload["keep"]))
    group.start()
    while group.is_alive():
        group.join(_CHECK_S)
        report_new()


class FairStopping(FIFOScheduler):
    """ASHA within each case, so that no strategy is stopped because another one is better or faster."""

    def __init__(self, epochs: int, stopping: Stopping) -> None:
        super().__init__()
        self._epochs, self._stopping = epochs, stopping
        self._by_case: dict[str, AsyncHyperBandScheduler] = {}

    def remember(self, trial: Trial) -> None:
        """Adds an earlier trial's epochs to those that trials of its case are compared with."""
        metric = configs.from_text(trial.config).training.metric
        asha = self._asha(f"{trial.case.table}/{trial.case.name}")
        earlier: Any = SimpleNamespace(trial_id=str(trial.folder))
        asha.on_trial_add(None, earlier)  # pyright: ignore[reportArgumentType]
        best = float("-inf")
        for epoch, value in enumerate(epoch_metrics(trial.folder, metric), 1):
            best = max(best, value)
            asha.on_trial_result(None, earlier, {_EPOCH: epoch, METRIC: best})  # pyright: ignore[reportArgumentType]

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        self._of(trial).on_trial_add(tune_controller, trial)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        decision = self._of(trial).on_trial_result(tune_controller, trial, result)
        if decision == TrialScheduler.STOP:
            payload = trial.config["trial"]
            folder = Path(payload["folder"])
            metric = configs.from_text(payload["config"]).training.metric
            result_of(folder, metric, STOPPED).write(folder)
            if payload["ranks"] > 1:
                # Tune would end the driver only and leave the group running: ask the group to end.
                (folder / STOP_FILE).touch()
                return TrialScheduler.CONTINUE
        return decision

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        self._of(trial).on_trial_complete(tune_controller, trial, result)

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        self._of(trial).on_trial_remove(tune_controller, trial)

    def _of(self, trial: Any) -> AsyncHyperBandScheduler:
        return self._asha(trial.config["trial"]["case"])

    def _asha(self, case: str) -> AsyncHyperBandScheduler:
        if case not in self._by_case:
            self._by_case[case] = AsyncHyperBandScheduler(
                time_attr=_EPOCH,
                metric=METRIC,
                mode="max",
                # Above the last epoch, so that a trial that reaches it can finish by itself.
                max_t=max(self._epochs, self._stopping.grace_epochs) + 1,
                grace_period=self._stopping.grace_epochs,
                reduction_factor=self._stopping.reduction,
            )
        return self._by_case[case]


class _Watch(tune.Callback):
    """Reports trials as they end, and records those whose process died."""

    def __init__(self, by_folder: dict[str, Trial], on_end: Callable[[Trial], None]) -> None:
        self._by_folder, self._on_end = by_folder, on_end

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._end(trial)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        reason = str(trial.get_pickled_error() or trial.get_error() or "its process died")
        Result.failure(reason).write(Path(trial.config["trial"]["folder"]))
        self._end(trial)

    def _end(self, trial: Any) -> None:
        self._on_end(self._by_folder[trial.config["trial"]["folder"]])
