"""Writes the events of a run for TensorBoard: `tensorboard --logdir runs`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from types import TracebackType

from invdist.training.history import Event


class Writer:
    """Writes events as scalars, directions and annotation histograms."""

    def __init__(self, run: str | Path) -> None:
        """Writes an `events.out.tfevents*` file into the folder `run`, which is made if missing."""
        from torch.utils.tensorboard import SummaryWriter  # slow to import: only when it is used

        self._writer = SummaryWriter(log_dir=str(run), flush_secs=10)
        self._step = 0

    def write(self, event: Event) -> None:
        """Adds one event. Steps and epochs share the x axis `global_step`; other kinds are ignored."""
        kind = event.get("event")
        if kind == "step":
            self._step = int(event["global_step"])
            self._scalars("step", event, leave_out=("event", "epoch", "phase", "step", "global_step"))
            self._candidates(event)
        elif kind == "epoch":
            self._scalars("epoch", event, leave_out=("event", "epoch"))
            for group in ("valid", "directions", "seconds_by"):
                self._scalars(group, event.get(group) or {})
            self._annotations(event.get("annotations") or {})
            self._writer.flush()
        elif kind == "final":
            for group in ("valid", "test"):
                self._scalars(f"final_{group}", event.get(group) or {})
            self._writer.flush()
        elif kind == "warning":
            self._writer.add_text("warnings", str(event.get("message", "")), self._step)

    def close(self) -> None:
        """Writes what is pending and closes the file."""
        self._writer.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _scalars(self, group: str, values: Mapping[str, object], leave_out: Sequence[str] = ()) -> None:
        for name, value in values.items():
            if name not in leave_out and isinstance(value, Real) and not isinstance(value, bool):
                self._writer.add_scalar(f"{group}/{name}", float(value), self._step)

    def _candidates(self, event: Event) -> None:
        losses = event.get("candidate_losses") or []
        for multiplier, loss in zip(event.get("candidates") or [], losses, strict=False):
            if loss is not None:
                self._writer.add_scalar(f"candidates/{float(multiplier):+g}", float(loss), self._step)

    def _annotations(self, annotations: Mapping[str, object]) -> None:
        edges = annotations.get("edges")
        auc = annotations.get("auc")
        if isinstance(auc, Real):
            self._writer.add_scalar("annotations/auc", float(auc), self._step)
        for name in ("w1", "w0"):
            counts = annotations.get(name)
            if isinstance(edges, Sequence) and isinstance(counts, Sequence) and sum(counts):
                middles = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
                self._writer.add_histogram_raw(
                    f"annotations/{name}",
                    min=edges[0],
                    max=edges[-1],
                    num=sum(counts),
                    sum=sum(m * c for m, c in zip(middles, counts, strict=True)),
                    sum_squares=sum(m * m * c for m, c in zip(middles, counts, strict=True)),
                    bucket_limits=list(edges[1:]),
                    bucket_counts=list(counts),
                    global_step=self._step,
                )
