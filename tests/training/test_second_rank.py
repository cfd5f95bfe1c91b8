"""Whether further ranks on one host pay: the model, what `auto` makes of it, and the warning of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from invdist import config as configs
from invdist.config.registry import BACKBONES
from invdist.embeddings.comm import Comm
from invdist.embeddings.shared_memory import connect
from invdist.runtime.errors import UserError
from invdist.training import sizes
from invdist.training.second_rank import StepCost, too_many_ranks
from tests.distributed import run_ranks

GMF, NEUMF = (StepCost.of(BACKBONES.get(name)(32)) for name in ("gmf", "neumf"))


def test_a_second_rank_pays_for_large_batches_and_for_models_that_compute_much() -> None:
    assert (GMF.columns, GMF.weights) == (32, 33)
    assert not GMF.pays(1024, 2)
    assert GMF.pays(16384, 2)
    assert NEUMF.pays(1024, 2)
    assert not NEUMF.pays(64, 2)


@pytest.mark.parametrize("cost", [GMF, NEUMF, StepCost(8, 9)])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_least_batch_is_where_they_begin_to_pay(cost: StepCost, ranks: int) -> None:
    least = cost.least_batch(ranks)
    assert least is not None
    assert cost.pays(least + 1, ranks)
    assert not cost.pays(least - 1, ranks)


def test_the_best_number_of_ranks_is_the_one_of_the_shortest_step() -> None:
    assert GMF.best_ranks(1024, 64) == 1
    assert NEUMF.best_ranks(2, 64) == 1
    assert GMF.best_ranks(1_000_000, 4) == 4
    for batch in (1024, 65536):
        best = NEUMF.best_ranks(batch, 64)
        assert all(NEUMF.step_us(batch, best) <= NEUMF.step_us(batch, ranks) for ranks in range(1, 65))


def _suited(monkeypatch: pytest.MonkeyPatch, gpus: int, *overrides: str, cores: int = 4) -> Any:
    monkeypatch.setattr(sizes, "own_cores", lambda: cores)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    rows = {"train": 10_000_000, "training_test": 0, "valid": 10, "test": 10, "unclear": 0}
    config = configs.from_mapping({"data": {"path": "x"}}, ["ray.workers=auto", *overrides])
    return sizes.suited(config, SimpleNamespace(rows=rows)).ray  # type: ignore[arg-type]


def test_auto_takes_ranks_where_they_pay_and_a_rank_for_each_gpu(monkeypatch) -> None:
    few = _suited(monkeypatch, 0, "data.batch_size=1024")
    assert (few.workers, few.cpus_per_worker) == (1, 1.0)
    many = _suited(monkeypatch, 0, "data.batch_size=65536")
    assert (many.workers, many.cpus_per_worker) == (GMF.best_ranks(65536, 4), 1.0)
    assert many.workers > 1
    assert _suited(monkeypatch, 3, "data.batch_size=1024").workers == 3
    assert _suited(monkeypatch, 3, "data.batch_size=1024", "ray.device=cpu").workers == 1
    assert _suited(monkeypatch, 0, "data.batch_size=auto").workers == GMF.best_ranks(16384, 4)


def test_on_two_cores_auto_takes_one_worker_with_threads_where_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    for settings, threads in (
        (["data.batch_size=16384"], 1.0),
        (["data.batch_size=32768"], 2.0),
        (["data.batch_size=128", "model=neumf"], 1.0),
        (["data.batch_size=1024", "model=neumf"], 2.0),
    ):
        found = _suited(monkeypatch, 0, *settings, cores=2)
        assert (found.workers, found.cpus_per_worker) == (1, threads)
    assert _suited(monkeypatch, 2, "data.batch_size=16384", cores=2).cpus_per_worker == 1.0


def test_auto_has_no_number_elsewhere() -> None:
    with pytest.raises(UserError, match=r"ray\.workers=auto"):
        _ = configs.from_mapping({"data": {"path": "x"}}, ["ray.workers=auto"]).ray.ranks


def _warned(rank: int, ranks: int) -> list[str | None]:
    shared, gloo, backbone = connect(), Comm(), BACKBONES.get("gmf")(32)
    return [too_many_ranks(comm, backbone, batch) for comm in (shared, gloo) for batch in (1024, 32768)]


def test_ranks_of_one_host_are_told_where_they_do_not_pay() -> None:
    for small, large, *through_gloo in run_ranks(_warned, 2):
        assert "2 workers on one machine with 1,024 interactions a step" in small
        assert f"pay from about {GMF.least_batch(2):,}" in small
        assert "ray.workers=1 is faster" in small
        assert large is None
        assert through_gloo == [None, None]
