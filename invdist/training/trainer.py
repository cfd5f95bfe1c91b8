"""Training on one rank, read in the order things happen: build, restore, epochs, finish.

Every rank runs the same `Trainer` in step with the others. It knows no strategy by name and nothing of Ray.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from invdist import config as configs
from invdist.config import Config
from invdist.config.plain_yaml import dotted, parse
from invdist.config.registry import STRATEGIES
from invdist.data.dataset import Dataset
from invdist.data.stream.batches import Stream, StreamSpec
from invdist.embeddings.comm import Comm
from invdist.learning.directions import direction_name
from invdist.learning.inverse_gradient import TrainingDiverged
from invdist.learning.strategy import Phase, Record, Strategy
from invdist.models.build import ModelSpec, build_recommender
from invdist.models.recommender import Recommender
from invdist.runtime.errors import UserError
from invdist.runtime.install import installed
from invdist.training import run_folder
from invdist.training.checkpoint import CheckpointStore, Position
from invdist.training.data_checks import setting_of, stream_of
from invdist.training.events import EventLog
from invdist.training.prefetch import with_exchange
from invdist.training.scoring import Probe, SplitScorer

_CONTROL_STEPS = 16
"""Ranks ask each other this often whether to stop."""


@dataclass(slots=True)
class Progress:
    """What the present epoch has done so far: checkpointed, so that a resumed epoch reports itself whole."""

    loss: float = 0.0
    steps: int = 0
    rows: int = 0
    seconds: float = 0.0
    directions: dict[str, int] = field(default_factory=dict)
    seconds_by: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """How training went: checkpointed too."""

    best: float | None = None
    best_epoch: int | None = None
    stale: int = 0
    """Epochs since the best."""
    rows: int = 0
    seconds: float = 0.0
    directions: dict[str, int] = field(default_factory=dict)


class Trainer:
    """One rank of a training run."""

    def __init__(
        self,
        config: Config,
        run: Path,
        *,
        device: torch.device,
        comm: Comm | None = None,
        make_readers: Callable[[StreamSpec], Sequence[Any]] | None = None,
    ) -> None:
        self.config, self.run, self.device = config, run, device
        self.comm = comm or Comm()
        self.dataset = Dataset.open(config.data.path, verify="fast")
        self.model = build_model(config, self.dataset, device, self.comm)
        # Dropout differs between ranks. After the model, whose making seeds all GPUs alike.
        torch.manual_seed(config.seed * 100_003 + self.comm.rank)
        self.strategy = build_strategy(config, self.dataset, self.model)
        self.phases = self.strategy.phases(self.strategy.setting)
        self.streams = self._streams(make_readers)
        self.store = CheckpointStore(
            run_folder.checkpoints(config, run),
            self.comm,
            keep_last=config.checkpoint.keep_last,
            keep_best=config.checkpoint.keep_best,
            asynchronous=config.checkpoint.asynchronous,
            timeout_s=config.ray.timeout_s,
        )
        self.events = EventLog(run, writes=self.comm.rank == 0)
        self.position = Position()
        self.progress, self.outcome = Progress(), Outcome()

    def fit(self, on_epoch: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
        """Trains to the end, or to a stop asked for; gives the fields of the final event.

        `on_epoch` is called on every rank with the validation metrics of each epoch, once it is saved.
        """
        self._restore()
        self._announce()
        scorer = self._scorer("valid")
        self._check_metric(scorer)
        probe = Probe(self.dataset, self.strategy, self.config.data.eval_batch_size)
        try:
            while self.position.epoch < self.config.training.epochs and not self._out_of_patience():
                if not self._epoch():
                    return self._stopped()
                valid = self._end_epoch(scorer, probe)
                if on_epoch is not None:
                    on_epoch(valid)
            return self._finish(scorer, probe)
        finally:
            self.events.close()

    # One epoch

    def _epoch(self) -> bool:
        """Goes through the phases from where `position` stands; False if asked to stop."""
        while self.position.phase < len(self.phases):
            phase, stream = self.phases[self.position.phase], self.streams[self.position.phase]
            passes = phase.passes if phase.epochs is None or self.position.epoch < phase.epochs else 0
            while self.position.pass_index < passes:
                if not self._pass(phase, stream):
                    return False
                self._advance(pass_index=self.position.pass_index + 1, step=0)
            self._advance(phase=self.position.phase + 1, pass_index=0)
        return True

    def _pass(self, phase: Phase, stream: Stream) -> bool:
        """One pass over the rows of a phase; False if asked to stop."""
        number = self.position.epoch * phase.passes + self.position.pass_index
        watch = self.strategy.watch
        steps = phase.steps(stream.steps)
        self._advance(step=max(self.position.step, steps.start))
        left = max(0, steps.stop - self.position.step)
        batches = itertools.islice(stream.epoch(number, start_step=self.position.step), left)
        started, every = time.perf_counter(), self.config.checkpoint.every_steps
        for batch, exchange in with_exchange(batches, self.strategy, phase, watch):
            record = self._step(phase, batch, exchange)
            self._advance(step=self.position.step + 1, global_step=self.position.global_step + 1)
            now = time.perf_counter()
            self._note(phase, stream, record, batch.global_rows, now - started)
            started = now
            if every and self.position.global_step % every == 0:
                self._save()
            if self._asked_to_stop():
                return False
        return True

    def _step(self, phase: Phase, batch: Any, exchange: Any) -> Record:
        try:
            return self.strategy.step(phase, batch, exchange)
        except TrainingDiverged as error:
            self.store.wait()
            last = self.store.latest()
            where = f"the last good checkpoint is {last.path}" if last else "there is no checkpoint yet"
            raise TrainingDiverged(
                f"step {self.position.global_step} (epoch {self.position.epoch}, {phase.name}): {error}; {where}. "
                "A smaller optimizer.gamma or alpha usually helps"
            ) from error

    def _note(self, phase: Phase, stream: Stream, record: Record, rows: int, seconds: float) -> None:
        """Adds a step to the epoch's account; writes it down if it chose a direction or its turn has come."""
        progress, position = self.progress, self.position
        progress.steps += 1
        progress.rows += rows
        progress.seconds += seconds
        direction = record.details.get("direction")
        if direction is not None:
            name = direction_name(direction)
            progress.directions[name] = progress.directions.get(name, 0) + 1
        loss = float(record.loss)
        progress.loss += loss
        if direction is not None or position.global_step % self.config.training.log_every == 0:
            rows_per_s = progress.rows / max(progress.seconds, 1e-9)
            self.events.write(
                "step",
                epoch=position.epoch,
                phase=phase.name,
                step=position.step,
                steps=stream.steps,
                global_step=position.global_step,
                loss=loss,
                rows_per_s=rows_per_s,
                eta_s=max(0, self._rows_per_epoch() - progress.rows) / rows_per_s,
                **record.details,
            )

    # The end of an epoch

    def _end_epoch(self, scorer: SplitScorer, probe: Probe) -> dict[str, float]:
        self.strategy.end_epoch()
        started = time.perf_counter()
        valid = scorer.metrics()
        annotations = probe.annotations()
        self._add_seconds(self.strategy.watch.take())
        self._add_seconds({"evaluate": time.perf_counter() - started})
        progress, outcome = self.progress, self.outcome
        metric = valid[self.config.training.metric]
        improved = outcome.best is None or metric > outcome.best
        if improved:
            outcome.best, outcome.best_epoch, outcome.stale = metric, self.position.epoch, 0
        else:
            outcome.stale += 1
        outcome.rows += progress.rows
        outcome.seconds += progress.seconds
        for name, count in progress.directions.items():
            outcome.directions[name] = outcome.directions.get(name, 0) + count
        self.events.write(
            "epoch",
            epoch=self.position.epoch,
            global_step=self.position.global_step,
            seconds=progress.seconds,
            rows=progress.rows,
            rows_per_s=progress.rows / max(progress.seconds, 1e-9),
            loss=progress.loss / max(progress.steps, 1),
            directions=progress.directions,
            seconds_by=progress.seconds_by,
            valid=valid,
            annotations=annotations,
            improved=improved,
        )
        self.progress = Progress()
        self._advance(epoch=self.position.epoch + 1, phase=0, pass_index=0, step=0)
        self._save(metric)
        return valid

    def _finish(self, scorer: SplitScorer, probe: Probe) -> dict[str, Any]:
        """Goes back to the best epoch, touches the test rows once, and writes the final event."""
        self.store.wait()
        best = self.store.best()
        if best is not None:
            self.store.load(best, self.model, self.strategy)
        tested = self.config.training.test and self.dataset.rows.get("test")
        final = {
            "method": self.config.method,
            "model": self.config.model,
            "valid": scorer.metrics(),
            "test": self._scorer("test").metrics() if tested else None,
            "annotations": probe.annotations(),
            "best_epoch": self.outcome.best_epoch,
            "epochs": self.position.epoch,
            "rows_per_s": self.outcome.rows / max(self.outcome.seconds, 1e-9),
            "seconds": self.outcome.seconds,
            "directions": self.outcome.directions,
            "checkpoint": best.path if best is not None else None,
        }
        self.events.write("final", **final)
        return final

    def _check_metric(self, scorer: SplitScorer) -> None:
        """Before the first step: the metric that chooses the best epoch must be one that the rows can give."""
        metric = self.config.training.metric
        if metric in scorer.undefined():
            raise UserError(
                f"training.metric: {metric} is not defined on the validation rows of {self.config.data.path}, where no "
                "user has both classes; use training.metric=auc"
            )

    def _out_of_patience(self) -> bool:
        return self.outcome.stale >= self.config.training.patience

    # Stopping, saving, restoring

    def _asked_to_stop(self) -> bool:
        if self.position.global_step % _CONTROL_STEPS:
            return False
        asked = self.comm.rank == 0 and (self.run / run_folder.STOP_FILE).exists()
        flag = torch.tensor([float(asked)], device=self.device)
        return bool(self.comm.all_reduce(flag).wait())

    def _stopped(self) -> dict[str, Any]:
        self._save()
        self.store.wait()
        self.events.write("stopped", epoch=self.position.epoch, global_step=self.position.global_step)
        return {"stopped": True, "global_step": self.position.global_step}

    def _save(self, metric: float | None = None) -> None:
        self._add_seconds(self.strategy.watch.take())
        extra = {
            "config": configs.dump(self.config),
            "dataset": self.dataset.fingerprint,
            "phases": self._phases(),
            "world_size": self.comm.size,
            "progress": dataclasses.asdict(self.progress),
            "outcome": dataclasses.asdict(self.outcome),
        }
        started = time.perf_counter()
        self.store.save(self.model, self.strategy, self.position, extra, metric)
        self._add_seconds({"checkpoint": time.perf_counter() - started})

    def _restore(self) -> None:
        """Continues from the newest checkpoint of the run folder, if it has one."""
        # Where all are damaged the second look says so; where there are none it finds none.
        last = self.store.latest(valid_only=True) or self.store.latest()
        if last is None:
            return
        position, extra = self.store.load(last, self.model, self.strategy, fallback=True)
        if extra["dataset"] != self.dataset.fingerprint:
            raise UserError(
                f"{last.path} was trained on another data set than {self.config.data.path}: "
                "resume with the data set of the run, or start a new run"
            )
        self._check_continues(position, extra)
        self.position = position
        self.progress, self.outcome = Progress(**extra["progress"]), Outcome(**extra["outcome"])
        newest = self.store.newest_step()
        if newest is not None and newest > position.global_step:
            message = f"the checkpoint of step {newest:,} is damaged: going on from step {position.global_step:,}"
            self.events.write("warning", message=message)
        self.events.write("resume", checkpoint=last.path, **dataclasses.asdict(position))

    def _check_continues(self, position: Position, extra: dict[str, Any]) -> None:
        """Settings may change with a resume, but not those that tell where a half-done epoch is, or what is best."""
        texts = extra["config"], configs.dump(self.config)
        before, now = (dotted(parse(text.encode(), "settings")) for text in texts)
        fixed = ["training.metric"]
        if (position.phase, position.pass_index, position.step) != (0, 0, 0):  # within an epoch
            fixed += ["data.batch_size", "data.window_rows", "seed"]
            fixed += [key for key in now if key.startswith("unlabeled.")]
            if extra.get("phases", self._phases()) != self._phases():
                fixed += [key for key in now if key.startswith(f"{self.config.method}.")]
        changed = [f"{key}={before[key]}" for key in fixed if key in before and before[key] != now[key]]
        if changed:
            raise UserError(
                f"{self.run} is at step {position.step:,} of an epoch with {', '.join(changed)}, which cannot change "
                "there: resume with that, or start a new run"
            )

    def _phases(self) -> list[Any]:
        """The phases as a checkpoint notes them."""
        return json.loads(json.dumps([dataclasses.asdict(phase) for phase in self.phases]))

    # Small parts

    def _announce(self) -> None:
        layout = self.model.rows.layout
        pids = torch.zeros(self.comm.size, dtype=torch.float64, device=self.device)
        pids[self.comm.rank] = os.getpid()
        pids = self.comm.all_reduce(pids).wait()
        self.events.write(
            "start",
            method=self.config.method,
            model=self.config.model,
            world_size=self.comm.size,
            pids=[int(pid) for pid in pids],
            device=str(self.device),
            backend=torch.distributed.get_backend(self.comm.group),
            plan=[
                {
                    "table": table.name,
                    "sharding": layout.sharding[table.name],
                    "rows": table.rows,
                    "dim": table.columns,
                    "shards": [dataclasses.asdict(shard) for shard in layout.of(table.name)],
                }
                for table in layout.tables
            ],
            plan_stats=self.model.rows.plan_stats,
            dataset=self.dataset.summary,
            environment=_environment(),
            rows_per_epoch=self._rows_per_epoch(),
            epochs=self.config.training.epochs,
        )

    def _rows_per_epoch(self) -> int:
        phases = [(s, p) for s, p in zip(self.streams, self.phases, strict=True) if p.epochs is None]
        return sum(s.rows * phase.passes * len(phase.steps(s.steps)) // s.steps for s, phase in phases)

    def _streams(self, make_readers: Callable[[StreamSpec], Sequence[Any]] | None) -> list[Stream]:
        """The stream of each phase; phases that read the same share one."""
        specs, prefetch = [stream_of(self.config, phase) for phase in self.phases], self.config.data.prefetch
        made: dict[StreamSpec, Stream] = {}
        for spec in dict.fromkeys(specs):
            readers = make_readers(spec) if make_readers else None
            made[spec] = Stream(spec, self.comm.rank, self.comm.size, readers=readers, prefetch=prefetch)
        return [made[spec] for spec in specs]

    def _scorer(self, split: str) -> SplitScorer:
        data, training = self.config.data, self.config.training
        return SplitScorer(self.dataset, split, self.strategy, data.eval_batch_size, training.ndcg_k)

    def _advance(self, **changes: int) -> None:
        self.position = dataclasses.replace(self.position, **changes)

    def _add_seconds(self, seconds: dict[str, float]) -> None:
        for name, value in seconds.items():
            self.progress.seconds_by[name] = self.progress.seconds_by.get(name, 0.0) + value


def build_model(config: Config, dataset: Dataset, device: torch.device, comm: Comm) -> Recommender:
    """The model that a config describes, sized for a data set."""
    rows, optimizer = config.rows, config.optimizer
    spec = ModelSpec(
        users=dataset.users,
        items=dataset.items,
        model=config.model,
        dim=rows.dim,
        bias=rows.bias,
        dropout=config.tower.dropout,
        init_std=rows.init_std,
        seed=config.seed,
        sharding=rows.sharding,
        optimizer=rows.optimizer,
        gamma=optimizer.gamma,
        weight_decay=optimizer.weight_decay,
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        eps=optimizer.eps,
        precision=config.training.precision,
        batch_size=config.data.batch_size,
        hbm_gb=rows.hbm_gb,
        ddr_gb=rows.ddr_gb,
    )
    return build_recommender(spec, device, comm)


def build_strategy(config: Config, dataset: Dataset, model: Recommender) -> Strategy:
    """The strategy that a config names, over a model."""
    return STRATEGIES.get(config.method)(setting_of(config, dataset), model)


def _environment() -> dict[str, str | None]:
    packages = ("invdist", "torch", "torchrec", "ray", "pyarrow", "numpy")
    return {"python": platform.python_version(), **{name: installed(name) for name in packages}}
