"""Labels that train again, against what the older model says of their pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from invdist.data.dataset import Dataset
from invdist.data.schema import TRAINING_LABELED
from invdist.data.stream.batches import Batch
from invdist.embeddings.exchange import Exchange
from invdist.models.frozen import FrozenModel
from invdist.serving.run import open_run
from invdist.training import trainer
from invdist.training.history import History
from invdist.training.replay import Replay
from tests.growing import QUICK, VECTORS, a_day, grow_here
from tests.runs import train_here


@pytest.mark.parametrize("replay", [0.5, 0.0, 1.0])
def test_labels_that_train_again_say_what_the_older_model_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replay: float
) -> None:
    """Against the older rows and weights, put together with today's vectors by hand."""
    monday = a_day(tmp_path, "monday", range(60))
    tuesday = a_day(tmp_path, "tuesday", range(20, 80), "monday", 1, keep=0, older="unclear", replay=replay)
    parent = train_here(monday, tmp_path / "runs/monday", *QUICK, "training.epochs=5", *VECTORS)
    softened, rates = _noted(monkeypatch), _rates(monkeypatch)
    child = grow_here(parent, tmp_path / "runs/tuesday", f"data.path={tuesday}")
    assert rates == [2 * 0.03]
    older, newer = open_run(parent).model, open_run(child).model
    own = older.backbone.columns
    user, item = (torch.cat([a[:, :own], b[: len(a), own:]], 1) for a, b in zip(*map(_tables, (older, newer))))
    seen = set()
    for before, after in softened:
        assert before.replayed is not None
        again = before.replayed > 0
        seen |= set(zip(before.user[again].tolist(), before.item[again].tolist()))
        said = older.backbone(user[before.user[again]], item[before.item[again]]).sigmoid()
        torch.testing.assert_close(after.label[again], replay * before.label[again] + (1 - replay) * said)
        assert torch.equal(after.label[~again], before.label[~again])
    first, second = (Dataset.open(str(data)) for data in (monday, tuesday))
    assert seen == {pair for pair, mark in _pairs(second, "replayed") if mark}
    learned = {pair for pair, _ in _pairs(first, "label")}
    assert seen <= learned
    assert len(seen) == pytest.approx(
        replay * len(learned - {pair for pair, day in _pairs(second, "day") if day}), rel=0.2
    )


def _noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Batch, Batch]]:
    """Every batch before and after its labels are softened, from now on."""
    found, call = [], Replay.__call__

    def noted(replay: Replay, batch: Batch, exchange: Exchange) -> Batch:
        found.append((batch, call(replay, batch, exchange)))
        return found[-1][1]

    monkeypatch.setattr(Replay, "__call__", noted)
    return found


def _rates(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The learning rate of the head's own columns in every run that is held, from now on; `exposures.gamma` is 0.03."""
    found, call = [], trainer.hold

    def noted(config: Any, dataset: Any, strategy: Any, *more: Any) -> Replay | None:
        replay = call(config, dataset, strategy, *more)
        found.append(strategy.model.rows.optimizer.groups[1].gamma)
        return replay

    monkeypatch.setattr(trainer, "hold", noted)
    return found


def _pairs(dataset: Dataset, column: str) -> list[tuple[tuple[int, int], int]]:
    """The pairs of the training splits, by index, each with another column."""
    tables = [dataset.read(split, ["user", "item", column]).to_pydict() for split in TRAINING_LABELED]
    return [((u, i), value) for t in tables for u, i, value in zip(t["user"], t["item"], t[column], strict=True)]


def _tables(model: FrozenModel) -> tuple[torch.Tensor, torch.Tensor]:
    return model.user, model.item


@pytest.mark.parametrize(
    "case",
    ["another loss moved the model", "data of before", "a day was left out", "all train", "old ones are dropped"],
)
def test_labels_stay_as_they_are_where_the_model_cannot_speak_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    older = {"keep": 0, "older": "unclear"}
    monday = a_day(tmp_path, "monday", range(60))
    if case == "all train":
        older = {}
    if case.startswith("old"):
        older = {"keep": 0}
    tuesday = a_day(tmp_path, "tuesday", range(20, 80), "monday", 1, **older)
    more = ("method=ns", "unlabeled.source=sampled") if case.startswith("another") else ()
    if case.startswith("data"):
        manifest = json.loads((tuesday / "dataset.json").read_text())
        del manifest["replay"]
        (tuesday / "dataset.json").write_text(json.dumps(manifest))
    if case.startswith("a day"):
        tuesday = a_day(tmp_path, "wednesday", range(30, 90), "tuesday", 2, **older)
    parent = train_here(monday, tmp_path / "runs/monday", *QUICK, "training.epochs=1", *VECTORS, *more)
    softened, rates = _noted(monkeypatch), _rates(monkeypatch)
    assert History.read(grow_here(parent, tmp_path / "runs/tuesday", f"data.path={tuesday}")).final is not None
    assert not softened
    assert rates == [0.03]
