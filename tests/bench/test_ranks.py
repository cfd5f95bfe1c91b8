"""Scaling over ranks at its smallest size, and the simulated latency against its own clock."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from invdist.bench._delay import delay
from invdist.bench._steps import on_ranks
from invdist.cli import bench
from invdist.embeddings.shared_memory import connect

_SMALL = ["--users", "300", "--items", "500", "--dim", "8", "--batch", "64", "--repeats", "3", "--json"]


@pytest.mark.slow
def test_weak_scaling_and_latency(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["ranks", *_SMALL, "--parts", "weak", "latency", "--world-size", "3", "--latency", "100"]
    assert bench.main(arguments) == 0
    figures = json.loads(capsys.readouterr().out)
    for suffix in ("64", "64_ig"):
        alone, together = figures[f"alone_ms_{suffix}"], figures[f"two_ranks_ms_{suffix}"]
        assert figures[f"weak_scaling_{suffix}"] == pytest.approx(alone / together)
        assert 0 < alone < 1000
    assert [(row["ranks"], row["method"]) for row in figures["latency"]] == [(3, "plain"), (3, "ig")]
    for row in figures["latency"]:
        assert row["modelled_ms"] == pytest.approx(row["step_ms"] - (row["waits"] - row["modelled_waits"]) * 100)
        # Each message that a step waits for costs its latency; half of one is for other load on the machine.
        assert row["waits"] > row["modelled_waits"] - 0.5


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_strong_scaling_trains_by_ray(tiny_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--parts", "strong", "--data", str(tiny_data), "--epochs", "2"]
    assert bench.main(["ranks", *_SMALL, *small]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["strong_scaling_64"] == pytest.approx(figures["two_rows_per_s_64"] / figures["one_rows_per_s_64"])
    assert figures["threads_64"] > 0
    assert figures["free_messages_64"] == pytest.approx(
        2 * figures["half_rows_per_s_64"] / figures["one_rows_per_s_64"]
    )


def _arrivals(rank: int, clock: str) -> tuple[float, float]:
    """Seconds that a message takes after the last rank has sent it, when rank 1 sends late; then without latency."""
    comm = connect()
    late = delay(comm, clock)
    found = []
    for latency in (0.2, 0.0):
        comm.barrier()
        late.seconds = latency
        started = time.monotonic()
        if rank == 1:
            time.sleep(0.1)
        total = comm.all_reduce(torch.ones(1)).wait()
        late.seconds = 0.0
        assert total.item() == 2
        found.append(time.monotonic() - started)
    return found[0], found[1]


def test_a_late_message_arrives_after_the_last_sender(tmp_path: Path) -> None:
    for delayed, plain in on_ranks(_arrivals, 2, str(tmp_path / "clock")):
        assert delayed >= 0.3 - 0.02  # 0.1 until the last rank sends, 0.2 on the way; barriers end a little apart
        assert plain < delayed - 0.1
