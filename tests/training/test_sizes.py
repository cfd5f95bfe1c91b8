"""Settings that are `auto` get numbers that suit the data set, once, before a run starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from invdist import config as configs
from invdist.config.defaults import OWN_DATA
from invdist.config.registry import STRATEGIES
from invdist.data.dataset import Dataset
from invdist.training.data_checks import misfits
from invdist.training.sizes import again_automatic, batch_size, gamma, patience, suited


def _dataset(train: int, training_test: int = 0) -> Any:
    return SimpleNamespace(rows={"train": train, "training_test": training_test, "valid": 10, "test": 10, "unclear": 0})


@pytest.mark.parametrize(
    ("train", "training_test", "batch"),
    [
        (6_480, 720, 259),  # 25 steps an epoch
        (27_005, 3_001, 1024),
        (90_000, 9_999, 1024),
        (90_000, 10_000, 3600),  # 25 steps here too
        (108_023, 12_002, 4096),
        (1_900_000, 99_999, 4096),
        (1_900_000, 100_000, 16384),
        (9_000_000, 1_000_000, 16384),
    ],
)
def test_batch_and_gamma_follow_the_number_of_labels(train: int, training_test: int, batch: int) -> None:
    config = configs.load(OWN_DATA)
    fixed = suited(config, _dataset(train, training_test))
    assert fixed.data.batch_size == batch
    assert fixed.optimizer.gamma == pytest.approx(1e-3 * (batch / 1024) ** 0.5)
    assert config.data.batch_size == config.optimizer.gamma == "auto", "the settings themselves stay as they were"


@pytest.mark.parametrize(
    ("labels", "patience"),
    [(3_000, 11), (30_006, 10), (99_999, 4), (600_125, 3), (6_000_000, 3)],  # 300 steps of 30, 98, 147, 367
)
def test_patience_has_300_steps(labels: int, patience: int) -> None:
    dataset = _dataset(labels - labels // 10, labels // 10)
    assert suited(configs.load(OWN_DATA), dataset).training.patience == patience
    assert suited(configs.load(OWN_DATA, ["training.patience=2"]), dataset).training.patience == 2


def test_numbers_that_are_given_stay_and_gamma_suits_a_given_batch() -> None:
    numbers = ["data.batch_size=4096", "optimizer.gamma=0.5", "training.patience=3"]
    given = configs.load(OWN_DATA, [*numbers, "method=ig", "ig.alpha_ratio=7"])
    assert configs.dump(suited(given, _dataset(30_000))) == configs.dump(given), "options of the method too"
    assert suited(configs.load(OWN_DATA, ["data.batch_size=4096"]), _dataset(30_000)).optimizer.gamma == 2e-3
    assert suited(configs.load(OWN_DATA, ["optimizer.gamma=0.5"]), _dataset(30_000)).optimizer.gamma == 0.5


def test_every_worker_has_a_row_of_a_step_on_the_smallest_data() -> None:
    assert suited(configs.load(OWN_DATA, ["ray.workers=4"]), _dataset(12)).data.batch_size == 4


def test_the_defaults_of_the_library_are_numbers() -> None:
    config = configs.from_mapping({"data": {"path": "x"}})
    assert (batch_size(config), gamma(config), patience(config)) == (1024, 1e-3, 3)


def test_what_is_not_resolved_yet_is_not_a_number() -> None:
    with pytest.raises(ValueError, match=r"data\.batch_size is auto"):
        batch_size(configs.load(OWN_DATA))


def test_a_suited_config_fits_the_data_and_is_read_back_with_its_numbers(tiny_data: Path) -> None:
    dataset = Dataset.open(str(tiny_data))
    config = configs.load(OWN_DATA, [f"data.path={tiny_data}"])
    assert misfits(config, dataset) == []
    fixed = suited(config, dataset)
    assert batch_size(configs.from_text(configs.dump(fixed))) == dataset.rows["train"] // 25
    assert gamma(configs.from_text(configs.dump(fixed))) == gamma(fixed)


def test_sizes_that_were_chosen_for_a_data_set_are_told_from_those_that_were_given() -> None:
    chosen = suited(configs.load(OWN_DATA), _dataset(500_000))
    assert again_automatic(chosen, _dataset(500_000)) == ["data.batch_size=auto", "optimizer.gamma=auto"]
    given = suited(configs.load(OWN_DATA, ["data.batch_size=2048"]), _dataset(500_000))
    assert again_automatic(given, _dataset(500_000)) == []
    given = suited(configs.load(OWN_DATA, ["optimizer.gamma=0.5"]), _dataset(500_000))
    assert again_automatic(given, _dataset(500_000)) == ["data.batch_size=auto"]


@pytest.mark.parametrize("method", STRATEGIES.names())
def test_nobody_learns_exposure_vectors_to_count_means(method: str) -> None:
    config = configs.load(OWN_DATA, [f"method={method}", "exposures.vectors=true"])
    assert suited(config, _dataset(1000)).exposures.vectors == (method != "means")
