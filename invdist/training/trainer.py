"""Training on one rank, read in the order things happen: build, restore, epochs, finish.

Every rank runs the same `Trainer` in step with the others. It knows no strategy by name and nothing of Ray.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from invdist import config as configs
from invdist.config import Config
from invdist.data.dataset import Dataset
from invdist.data.stream.batches import Stream, StreamSpec
from invdist.embeddings.comm import Comm
from invdist.embeddings.kernels import native
from invdist.embeddings.shared_memory import connect
from invdist.embeddings.store import EmbeddingStore
from invdist.learning.strategy import Phase, Record, TrainingDiverged
from invdist.runtime.install import environment
from invdist.runtime.paths import AnyPath
from invdist.training import run_folder, sizes
from invdist.training.baseline import MeansBaseline, below_means
from invdist.training.build import build_model, build_strategy, open_streams, rows_per_epoch
from invdist.training.checkpoint import CheckpointStore, Position
from invdist.training.events import EventLog, Sink
from invdist.training.growth import grow, hold
from invdist.training.late import Answers, StepLog, Taken
from invdist.training.pace import Pace
from invdist.training.prefetch import with_exchange
from invdist.training.resume import check_continues, described
from invdist.training.scoring import Probe, SplitScorer
from invdist.training.second_rank import too_many_ranks
from invdist.training.totals import EpochTotals, RunTotals
from invdist.training.vectors import load_or_learn

_CONTROL_STEPS = 16
"""Steps between two looks for a request to stop or to save, which all ranks take together."""


class Trainer:
    """One rank of a training run."""

    def __init__(
        self,
        config: Config,
        run: AnyPath,
        *,
        device: torch.device,
        comm: Comm | None = None,
        make_readers: Callable[[StreamSpec], Sequence[Any]] | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        """`sinks` are other places that the first rank writes its events to."""
        self.config, self.run, self.device = config, run, device
        self.comm = comm or connect(timeout_s=config.ray.timeout_s)
        self.dataset = Dataset.open(config.data.path, verify="fast")
        self.events = EventLog(run, writes=self.comm.rank == 0, flush_every=config.training.log_every, sinks=sinks)
        self.model = build_model(config, self.dataset, device, self.comm, self._vectors())
        # Dropout must differ between ranks. Seeded after the model, which seeds all GPUs alike when it is built.
        torch.manual_seed(config.seed * 100_003 + self.comm.rank)
        self.strategy = build_strategy(config, self.dataset, self.model)
        self.phases = self.strategy.phases(self.strategy.setting)
        self.streams = open_streams(config, self.phases, self.comm, make_readers)
        self.store = CheckpointStore(
            run_folder.checkpoints(config, run),
            self.comm,
            keep_last=config.checkpoint.keep_last,
            keep_best=config.checkpoint.keep_best,
            asynchronous=config.checkpoint.asynchronous,
            deltas=config.checkpoint.deltas,
            timeout_s=config.ray.timeout_s,
        )
        self._stop_requests = run_folder.StopRequests(run)
        self.position, self.first_epoch, self.falling = Position(), 0, False
        self._saved_at = time.monotonic()
        self.epoch_totals, self.run_totals = EpochTotals(), RunTotals()
        self._steps = StepLog(self.events, config.training.log_every, device)
        self._answers = Answers(device)

    def fit(self, on_epoch: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
        """Trains to the end, or until a stop is requested; returns the fields of the final event.

        `on_epoch` is called on every rank with the validation metrics of each epoch, once it is saved.
        """
        try:
            self._restore()
            self.pace = self._paced()
            valid = self._scorer("valid")
            valid.check(self.config.training.metric, self.config.data.path)
            self._announce()
            probe = Probe(self.dataset, self.strategy, self.config.data.eval_batch_size)
            while self.position.epoch < self._last_epoch and not self._out_of_patience():
                if not self._epoch():
                    return self._stopped()
                metrics = self._end_epoch(valid, probe)
                if on_epoch is not None:
                    on_epoch(metrics)
            return self._finish(valid, probe)
        finally:
            self.events.close()

    # Before the first epoch

    def _vectors(self) -> EmbeddingStore | None:
        """The exposure vectors of the data set, learned now if no run has learned them before."""
        if not self.config.exposures.vectors:
            return None
        report = functools.partial(self.events.write, "vectors")
        return load_or_learn(self.config, self.dataset, device=self.device, comm=self.comm, report=report)

    def _restore(self) -> None:
        """Continues from the newest checkpoint of the run, if it has one."""
        # With only damaged checkpoints the second call raises; without any it returns None.
        last = self.store.latest(valid_only=True) or self.store.latest()
        if last is None:
            self._grow()
            return
        self.position, extra = self.store.load(last, self.model, self.strategy, fallback=True)
        check_continues(last.path, self.position, extra, self.config, self.dataset, self.phases)
        self.first_epoch, self.falling = extra.get("first_epoch", 0), extra.get("falling", False)
        self.epoch_totals, self.run_totals = EpochTotals(**extra["progress"]), RunTotals(**extra["outcome"])
        newest, step = self.store.newest_step(), self.position.global_step
        if newest is not None and newest > step:
            message = f"the checkpoint of step {newest:,} is damaged: going on from step {step:,}"
            self.events.write("warning", message=message)
        self.events.write("resume", checkpoint=last.path, **dataclasses.asdict(self.position))

    def _grow(self) -> None:
        """Starts from the model of the run that this one goes on from, if there is one."""
        if self.config.growth.run is None:
            return
        self.position, about, warning = grow(self.config, self.dataset, self.store, self.strategy)
        self.first_epoch, self.falling = self.position.epoch, about.pop("newer")
        self.events.write("grown", **about)
        if warning is not None:
            self.events.write("warning", message=warning)

    def _paced(self) -> Pace:
        """How fast to learn; a model that grew with its data is held to what it has learned before."""
        epochs = self._last_epoch - self.first_epoch
        pace = Pace(self.phases, self.streams, self.first_epoch, epochs, falling=self.falling)
        self._replay = hold(self.config, self.dataset, self.strategy, self.phases, pace)
        return pace

    def _announce(self) -> None:
        """Writes the start event: who trains what, where, on which data."""
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
            plan=self.model.rows.layout.describe(),
            plan_stats=self.model.rows.plan_stats,
            dataset=self.dataset.summary,
            environment={**environment(), "rows": native().said, **self.model.compiled},
            rows_per_epoch=rows_per_epoch(self.phases, self.streams),
            epochs=self._last_epoch,
        )
        if message := too_many_ranks(self.comm, self.model.backbone, self.streams[0].spec.batch_size):
            self.events.write("warning", message=message)

    # One epoch

    def _epoch(self) -> bool:
        """Takes the phases from `position` on; False if a stop was requested."""
        while self.position.phase < len(self.phases):
            phase, stream = self.phases[self.position.phase], self.streams[self.position.phase]
            while self.position.pass_index < phase.passes:
                if not self._pass(phase, stream):
                    return False
                self._advance(pass_index=self.position.pass_index + 1, step=0)
            self._advance(phase=self.position.phase + 1, pass_index=0)
        return True

    def _pass(self, phase: Phase, stream: Stream) -> bool:
        """One pass over the interactions of a phase; False if a stop was requested."""
        number = self.position.epoch * phase.passes + self.position.pass_index
        watch = self.strategy.watch
        steps = phase.steps(stream.steps)
        self._advance(step=max(self.position.step, steps.start))
        left = max(0, steps.stop - self.position.step)
        epoch = stream.epoch(number, self.position.step, next_start=self._next_start(phase, stream))
        batches = itertools.islice(epoch, left)
        started, every = time.perf_counter(), self.config.checkpoint.every_steps
        for batch, exchange in with_exchange(batches, self.strategy, phase, watch):
            record = self._step(phase, batch, exchange)
            self._advance(step=self.position.step + 1, global_step=self.position.global_step + 1)
            now = time.perf_counter()
            if self._steps.add(Taken(phase, stream.steps, self.position, record, batch.global_rows, now - started)):
                self._note()
            started = now
            stop, save = self._requests()
            if save or (every and self.position.global_step % every == 0):
                self._save()
            if stop:
                return False
        self._note()
        return True

    def _next_start(self, phase: Phase, stream: Stream) -> int | None:
        """The step that the next pass over the interactions of `stream` starts from; None after the last one."""
        if self.position.pass_index + 1 == phase.passes:
            if self.position.epoch + 1 == self._last_epoch:
                return None
            phase = self.phases[self.streams.index(stream)]
        return phase.steps(stream.steps).start

    def _step(self, phase: Phase, batch: Any, exchange: Any) -> Record:
        self.model.pace = self.pace.at(self.position)
        batch = batch if self._replay is None else self._replay(batch, exchange)
        return self._explained(phase, lambda: self.strategy.step(phase, batch, exchange))

    def _explained(self, phase: Phase, action: Callable[[], Any]) -> Any:
        """Does what may find that training has diverged; the error then says where and what to do."""
        try:
            return action()
        except TrainingDiverged as error:
            self.store.wait()
            last = self.store.latest()
            where = f"the last good checkpoint is {last.path}" if last else "there is no checkpoint yet"
            raise TrainingDiverged(
                f"step {self.position.global_step} (epoch {self.position.epoch}, {phase.name}): {error}; {where}. "
                "A smaller optimizer.gamma or alpha usually helps"
            ) from error

    def _note(self) -> None:
        """Adds the steps taken to the totals, and writes their events. On a GPU the host waits here."""
        self._steps.flush(self.epoch_totals, rows_per_epoch(self.phases, self.streams), self._explained)

    # The end of an epoch, and of the run

    def _end_epoch(self, scorer: SplitScorer, probe: Probe) -> dict[str, float]:
        self.strategy.end_epoch()
        started = time.perf_counter()
        valid = scorer.metrics()
        annotations = probe.annotations()
        self.epoch_totals.add_seconds(self.strategy.watch.take())
        self.epoch_totals.add_seconds({"evaluate": time.perf_counter() - started})
        epoch = self.position.epoch
        metric = valid[self.config.training.metric] if self.pace.chooses(epoch) else None
        improved = self.run_totals.add_epoch(epoch, self.epoch_totals, metric)
        self.events.write(
            "epoch",
            epoch=epoch,
            global_step=self.position.global_step,
            **self.epoch_totals.event(),
            valid=valid,
            annotations=annotations,
            improved=improved,
        )
        self.epoch_totals = EpochTotals()
        self._advance(epoch=epoch + 1, phase=0, pass_index=0, step=0)
        self._save(metric)
        return valid

    def _out_of_patience(self) -> bool:
        return self.run_totals.stale >= sizes.patience(self.config)

    def _finish(self, scorer: SplitScorer, probe: Probe) -> dict[str, Any]:
        """Goes back to the best epoch, scores the test split once, and writes the final event."""
        self.store.wait()
        best = self.store.best()
        if best is not None:
            self.store.load(best, self.model, self.strategy)
        tested = self.config.training.test and self.dataset.rows.get("test")
        scorers = {"valid": scorer, "test": self._scorer("test") if tested else None}
        baseline = MeansBaseline(self.dataset, self.comm, self.device)
        metrics = {k: baseline.with_few(found, found.scores()) if found else None for k, found in scorers.items()}
        means = {split: baseline.metrics(found) if found else None for split, found in scorers.items()}
        self._compare(metrics["valid"], means["valid"])
        final = {
            "method": self.config.method,
            "model": self.config.model,
            **metrics,
            "means": means,
            "annotations": probe.annotations(),
            "epochs": self.position.epoch,
            **self.run_totals.event(),
            "checkpoint": best.path if best is not None else None,
        }
        self.events.write("final", **final)
        return final

    def _compare(self, model: dict[str, float] | None, means: dict[str, float] | None) -> None:
        """Warns if the model is below the means baseline."""
        assert model is not None
        assert means is not None
        warning = below_means(self.config, model, means, self.run_totals.loss, self.position.epoch - self.first_epoch)
        if warning is not None:
            self.events.write("warning", message=warning)

    # Stopping and saving

    def _requests(self) -> tuple[bool, bool]:
        """Whether to stop, and whether it is time to save: the first rank decides, all look at the same steps."""
        if self.position.global_step % _CONTROL_STEPS:
            return False, False
        asked = torch.zeros(2)
        if self.comm.rank == 0:
            every, now = self.config.checkpoint.every_seconds, time.monotonic()
            asked[0] = float(self._stop_requests.asked())
            if every > 0 and now - self._saved_at >= every:
                asked[1], self._saved_at = 1.0, now  # asked for once, though a GPU saves a look later
        stop, save = self._answers.next(self.comm.all_reduce(asked.to(self.device)).wait())
        return bool(stop), bool(save)

    def _stopped(self) -> dict[str, Any]:
        self._save()
        self.store.wait()
        self.events.write("stopped", epoch=self.position.epoch, global_step=self.position.global_step)
        return {"stopped": True, "global_step": self.position.global_step}

    def _save(self, metric: float | None = None) -> None:
        self._note()  # a step that diverged must not be saved
        self.epoch_totals.add_seconds(self.strategy.watch.take())
        extra = {
            "config": configs.dump(self.config),
            "dataset": self.dataset.fingerprint,
            "first_epoch": self.first_epoch,
            "falling": self.falling,
            "phases": described(self.phases),
            "world_size": self.comm.size,
            "progress": dataclasses.asdict(self.epoch_totals),
            "outcome": dataclasses.asdict(self.run_totals),
        }
        started = time.perf_counter()
        self.events.flush()  # a run that goes on from this checkpoint has the events before it
        self.store.save(self.model, self.strategy, self.position, extra, metric)
        self._saved_at = time.monotonic()
        self.epoch_totals.add_seconds({"checkpoint": time.perf_counter() - started})

    # Small parts

    @property
    def _last_epoch(self) -> int:
        """The epoch to end before."""
        grown = self.config.growth.run is not None
        return self.first_epoch + (self.config.growth.epochs if grown else self.config.training.epochs)

    def _scorer(self, split: str) -> SplitScorer:
        data, training = self.config.data, self.config.training
        return SplitScorer(self.dataset, split, self.strategy, data.eval_batch_size, training.ndcg_k)

    def _advance(self, **changes: int) -> None:
        self.position = dataclasses.replace(self.position, **changes)
