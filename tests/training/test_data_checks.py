"""What a run needs of its data set, told before anything is started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from invdist import config, train
from invdist.config.registry import STRATEGIES
from invdist.data.dataset import Dataset
from invdist.runtime.errors import UserError
from invdist.training.data_checks import check_against_data

_ROWS = {"train": 1000, "training_test": 100, "valid": 10, "test": 10, "unclear": 50}


def _refusal(rows: dict[str, int] | None = None, items: int = 300, **settings: Any) -> str:
    """What is said of the settings on a data set of so many rows and 200 users; empty if they fit."""
    dataset: Any = SimpleNamespace(rows=_ROWS | (rows or {}), users=200, items=items)
    mapping = {"data": {"path": "x", "batch_size": 1000}} | settings
    try:
        check_against_data(config.from_mapping(mapping), dataset)
    except UserError as error:
        return str(error)
    return ""


def test_a_run_that_fits_its_data_passes() -> None:
    assert all(_refusal(method=method) == "" for method in STRATEGIES.names())


def test_a_run_that_does_not_fit_its_data_is_refused_with_every_reason() -> None:
    said = _refusal({"valid": 0, "unclear": 0}, data={"path": "x", "batch_size": 2000}, method="ig")
    assert "3 problems" in said
    assert "x: data.batch_size: 2000 is more than the 1000 training rows" in said
    assert "x: training.metric: auc needs validation rows" in said
    # Ten phases that want the same are one problem.
    assert "x: unlabeled.source: exposures: the data set has no unclear exposures" in said
    assert said == _refusal(
        {"valid": 0, "unclear": 0}, data={"path": "x", "batch_size": 2000}, method="ig", ig={"turns": 10}
    )


@pytest.mark.parametrize(
    ("rows", "items", "settings", "expected"),
    [
        ({"unclear": 0}, 300, {"method": "idl"}, "use sampled, or prepare with label_fraction below 1"),
        ({"unclear": 0}, 300, {"method": "ns", "unlabeled": {"source": "mix"}}, "unlabeled.source: mix"),
        ({"unclear": 0}, 300, {"method": "ig", "unlabeled": {"source": "sampled"}}, ""),
        ({"unclear": 0}, 300, {"method": "none"}, ""),
        ({"unclear": 0}, 300, {"method": "none", "exposures": {"vectors": True}}, ""),
        (
            {},
            300,
            {"method": "none", "exposures": {"vectors": True, "weight_decay": 2000}},
            "exposures.weight_decay: 2000 is too much",
        ),
        ({}, 300, {"method": "none", "exposures": {"vectors": True, "weight_decay": 900}}, ""),
        ({}, 5, {"method": "ns", "unlabeled": {"source": "sampled"}}, "all 200 x 5 pairs observed"),
        ({}, 5, {"method": "dns"}, "method: dns cannot do its phase train"),
        ({}, 5, {"method": "ns"}, ""),
        (
            {"training_test": 0},
            300,
            {"method": "ig"},
            "phase phase2: the data set has no rows in training_test",
        ),
        ({"training_test": 0}, 300, {"method": "none"}, ""),
        ({}, 300, {"method": "ig", "unlabeled": {"rate": 0}}, "unlabeled.rate: 0"),
        ({}, 300, {"method": "srns", "unlabeled": {"rate": 17}}, "srns.memory: 16 candidates"),
    ],
)
def test_what_the_phases_of_a_strategy_need(rows: dict, items: int, settings: dict, expected: str) -> None:
    said = _refusal(rows, items, **settings)
    assert expected in said if expected else said == ""


def test_training_is_refused_before_a_run_folder_or_ray_is_made(tmp_path: Path, all_labeled: Path) -> None:
    assert not Dataset.open(str(all_labeled), verify="fast").rows["unclear"]
    settings = {"data": {"path": str(all_labeled)}, "method": "ig", "runs": str(tmp_path / "runs")}
    with pytest.raises(UserError, match=r"unlabeled.source: exposures: the data set has no unclear exposures"):
        train.train(config.from_mapping(settings))
    assert not (tmp_path / "runs").exists()
