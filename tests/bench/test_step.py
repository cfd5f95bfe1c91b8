"""The step and scale benchmarks at small sizes: every figure is there, and the figures agree with each other."""

from __future__ import annotations

import json

import pytest
import torch

from invdist.cli import bench

KEYS = {
    "plain_ms",
    "ig_ms",
    "ratio",
    "fused_ms",
    "plain_vs_fused",
    "ig_vs_fused",
    "textbook_ms",
    "speedup_vs_textbook",
    "candidates7_ms",
    "bytes_sent_per_rank",
    "collectives",
    "rss_mb",
}


def test_step_with_exposure_vectors(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--users", "300", "--items", "500", "--dim", "8", "--batch", "64", "--repeats", "1"]
    sent = {}
    for columns in ("0", "16"):
        assert bench.main(["step", "--world-size", "2", "--json", *sizes, "--exposures", columns]) == 0
        sent[columns] = json.loads(capsys.readouterr().out)["plain_collectives"]
    assert sent["16"] == sent["0"] + 1
    assert bench.main(["step", "--exposures", "3"]) == 2


def test_repeated_rows_travel_once(capsys: pytest.CaptureFixture[str]) -> None:
    """At a high rate most rows that pairs name are named before; popular ids are so still more often."""
    sizes = ["--users", "300", "--items", "500", "--dim", "8", "--batch", "32", "--rate", "64", "--repeats", "1"]
    found = []
    for zipf in ("0", "1"):
        assert bench.main(["step", "--world-size", "2", "--json", *sizes, "--zipf", zipf]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert all(figures["rows_named"] == 2 * 32 * 65 for figures in found)
    assert found[1]["rows_distinct"] < found[0]["rows_distinct"] <= 800 + 64
    for figures in found:  # rows out, gradients back, deltas of V: less than two rows for each distinct one and its id
        assert figures["bytes_sent_per_rank"] < 2.5 * figures["rows_distinct"] * 8 * 4
    assert bench.main(["step", "--zipf", "-1"]) == 2


def test_exchange_at_many_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["exchange", "--json", "--ranks", "2", "64", "--batch", "64", "--repeats", "3"]) == 0
    figures = json.loads(capsys.readouterr().out)
    for ranks in (2, 64):
        assert 0 < figures[f"least_ms_{ranks}_ranks"] <= figures[f"ms_{ranks}_ranks"]
    assert bench.main(["exchange", "--ranks", "0"]) == 2
    assert "must be at least 1" in capsys.readouterr().err


def test_cost_of_learning_vectors(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--users", "300", "--items", "500", "--dim", "8", "--batch", "64", "--learned", "16", "--repeats", "1"]
    assert bench.main(["vectors", "--json", *sizes]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["ratio"] == pytest.approx(figures["exposure_us"] / figures["plain_row_us"])
    assert figures["tables_mb"] == pytest.approx(800 * (16 + 64 + 4) * 4 / 2**20)
    assert bench.main(["vectors", "--learned", "3"]) == 2


def test_step_on_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--users", "300", "--items", "500", "--dim", "8", "--batch", "64", "--repeats", "3"]
    assert bench.main(["step", "--world-size", "2", "--json", *sizes]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures.keys() >= KEYS
    assert (figures["device"], figures["backend"]) == ("cpu", "gloo")
    assert all(figures[key] > 0 for key in KEYS)
    assert figures["ratio"] == pytest.approx(figures["ig_ms"] / (2 * figures["plain_ms"]))
    assert figures["plain_vs_fused"] == pytest.approx(figures["plain_ms"] / figures["fused_ms"])
    assert figures["ig_vs_fused"] == pytest.approx(figures["ig_ms"] / figures["fused_ms"])
    assert figures["speedup_vs_textbook"] == pytest.approx(figures["textbook_ms"] / figures["ig_ms"])
    # Ids of (64 + 64) pairs out, gradients of both back, deltas of V; half of each stays on its rank. Rows are read in
    # the memory of the other rank.
    rows = 2 * 64 * 8 * 4
    assert 0.35 * 3 * rows < figures["bytes_sent_per_rank"] < 1.1 * 3 * rows
    assert figures["plain_bytes_sent_per_rank"] < figures["bytes_sent_per_rank"] / 2


@pytest.mark.slow
def test_scale(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        bench.main(["scale", "--json", "--rows", "400", "4000", "--dim", "8", "--batch", "32", "--repeats", "3"]) == 0
    )
    figures = json.loads(capsys.readouterr().out)
    assert [(row["rows"], row["method"]) for row in figures["rows"]] == [
        (400, "none"),
        (4000, "none"),
        (400, "ig"),
        (4000, "ig"),
    ]
    assert all(row["step_ms"] > 0 and row["peak_mb"] > 50 for row in figures["rows"])
    ms = [row["step_ms"] for row in figures["rows"]]
    assert figures["time_ratio"] == pytest.approx(ms[3] / ms[2])
    assert 0.9 < figures["memory_ratio"] < 1.1


def test_sizes_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["step", "--batch", "0"]) == 2
    assert "--batch must be at least 1" in capsys.readouterr().err
    assert bench.main(["step", "--dim", "6"]) == 2
    assert "multiple of 4" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize(
    "asked", [["--device", "cuda"], ["--backend", "nccl"], ["--device", "cuda", "--backend", "nccl"]]
)
def test_a_gpu_that_is_not_there_is_refused_by_name(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["step", "--json", *asked]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "torch.cuda.is_available() is False" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("device", "backend"), [("cuda", "gloo"), ("cpu", "nccl")])
def test_device_and_backend_must_agree(device: str, backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["step", "--device", device, "--backend", backend]) == 2
    assert f"--backend {backend} moves tensors of" in capsys.readouterr().err


def test_each_rank_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert bench.main(["step", "--device", "cuda", "--world-size", "2"]) == 2
    assert "--world-size 2: each rank needs a GPU, and 1 were found" in capsys.readouterr().err
