"""What a GPU has for the host is read late and together: the run is the same, and the host waits seldom."""

from __future__ import annotations

import contextlib
import itertools
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from invdist.data.stream.batches import Stream, StreamSpec
from invdist.runtime.process import single_rank
from invdist.training import late
from invdist.training import trainer as loop
from invdist.training.prefetch import SideStream, with_exchange
from tests.training.checkpointing import build, this_process
from tests.training.test_trainer import _events, _trainer


def _run(
    data: Path, run: Path, gpu_like: bool, moment: float = 0.0
) -> tuple[list[int], list[dict[str, Any]], list[dict[str, Any]]]:
    """How many steps were read at each wait, the step events, and the epoch events.

    On a CPU those of a `moment` are read together.
    """
    waits: list[int] = []
    read = late.read_scalars

    def counted(scalars: Any) -> list[float]:
        waits.append(len(scalars))
        return read(scalars)

    with (
        single_rank(),
        mock.patch.object(late, "reads_are_free", return_value=not gpu_like),
        mock.patch.object(late, "read_scalars", counted),
        mock.patch.object(late, "_MOMENT_S", moment),
    ):
        _trainer(str(data), run, training__log_every=10, checkpoint__every_steps=14, training__epochs=1).fit()
    unclocked = [{k: v for k, v in event.items() if k not in _CLOCK} for event in _events(run, "step")]
    return [count for count in waits if count], unclocked, _events(run, "epoch")


_CLOCK = ("time", "rows_per_s", "eta_s", "seconds")


def test_losses_are_read_together_and_nothing_else_changes(tiny_data: Path, tmp_path: Path) -> None:
    often, expected, (epoch,) = _run(tiny_data, tmp_path / "cpu", gpu_like=False)
    assert often == [1] * 38
    for gpu_like in (True, False):
        seldom, found, (late_epoch,) = _run(tiny_data, tmp_path / f"{gpu_like}", gpu_like, moment=1000.0)
        # 34 steps of phase 1, 4 of phase 2; saved after 14, 28 and 38.
        assert seldom == [10, 4, 10, 4, 6, 4]
        assert found == expected
        assert len(found) == 3 + 4
        for name in ("loss", "rows", "directions", "valid"):
            assert late_epoch[name] == epoch[name]


def test_a_late_answer_saves_once(tiny_data: Path, tmp_path: Path) -> None:
    """A look every 10 s, a checkpoint every 15 s: each is asked for at one look and made at the next."""
    fake = mock.Mock(monotonic=itertools.count(10, 10).__next__, perf_counter=time.perf_counter)
    with single_rank(), mock.patch.object(late, "reads_are_free", return_value=False):
        trainer = _trainer(str(tiny_data), tmp_path, checkpoint__every_seconds=15)
        trainer._saved_at = 0.0
        with mock.patch.object(loop, "time", fake):
            saves = [trainer._requests() == (False, True) for _ in range(8)]
        trainer.events.close()
    assert saves == [False, False, True, False, True, False, True, False]


def test_pinned_batches_are_the_same(tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = StreamSpec(path=str(tiny_data), batch_size=256, unlabeled_per_row=2)
    pinned: list[int] = []

    def pin(self: torch.Tensor) -> torch.Tensor:
        copy = self.clone()
        pinned.append(copy.untyped_storage().data_ptr())
        return copy

    expected = list(Stream(spec, 0, 1).epoch(0))
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    found = list(Stream(spec, 0, 1, pinned=True).epoch(0))
    for a, b in zip(found, expected, strict=True):
        for name in ("user", "item", "label", "unlabeled_user", "unlabeled_item"):
            assert torch.equal(getattr(a, name), getattr(b, name))
            assert getattr(a, name).untyped_storage().data_ptr() in pinned
    assert len(pinned) == 5  # once per block, not per batch


class _Cuda:
    """The calls that a stream of its own makes, in order; the events of compute are over when `over` says so."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.over, self.recorded = 0, 0
        cuda = self

        class Event:
            def record(self) -> None:
                cuda.recorded += 1
                self.number = cuda.recorded

            def query(self) -> bool:
                return self.number <= cuda.over

            def synchronize(self) -> None:
                if not self.query():
                    cuda.calls.append("wait for compute")
                    cuda.over = self.number

        self.Event = Event

    def Stream(self) -> str:
        return "side"

    @contextlib.contextmanager
    def stream(self, stream: str) -> Any:
        self.calls.append("enter")
        yield
        self.calls.append("leave")

    def current_stream(self) -> Any:
        return mock.Mock(wait_stream=lambda side: self.calls.append(f"wait for {side}"))


def test_the_exchange_of_the_next_batch_is_on_a_stream_of_its_own(tiny_data: Path) -> None:
    cuda = _Cuda()
    side = SideStream(cuda)
    spec = StreamSpec(path=str(tiny_data), batch_size=97)
    with this_process():
        strategy = build(users=200, items=300)
        (phase,) = strategy.phases(strategy.setting)
        plain = [batch for batch, _ in with_exchange(Stream(spec, 0, 1).epoch(0), strategy, phase, strategy.watch)]
        steps = 0
        for batch, exchange in with_exchange(Stream(spec, 0, 1).epoch(0), strategy, phase, strategy.watch, side):
            assert torch.equal(batch.user, plain[steps].user)
            assert exchange.routes
            cuda.calls.append("step")
            steps += 1
    # Compute waits for the exchange of its own batch, launched before, and is launched on its own stream.
    assert "enter" not in "".join(cuda.calls[cuda.calls.index("step") - 1 : cuda.calls.index("step")])
    assert cuda.calls.count("wait for side") == steps == len(plain)
    assert all(cuda.calls[i - 1] == "wait for side" for i, call in enumerate(cuda.calls) if call == "step")
    # The GPU of this test never finishes a step by itself: what it may still use is kept, up to a few.
    assert len(side._held) == 8
    assert cuda.calls.count("wait for compute") == steps - 8
