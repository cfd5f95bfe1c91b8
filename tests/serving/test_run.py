"""A run opened to be used scores exactly as the strategy it was trained with does."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from invdist.cli import prepare
from invdist.learning.strategy import Strategy
from invdist.runtime.errors import UserError
from invdist.serving.run import open_run
from invdist.serving.scoring import logits
from tests.runs import scores_of_training


@pytest.mark.parametrize("kind", ["gmf", "neumf", "vectors", "neumf vectors", "means"])
def test_the_frozen_model_scores_as_training_does(run_of: Callable[[str], Path], kind: str) -> None:
    source = np.random.default_rng(1)
    user, item = source.integers(200, size=500), source.integers(300, size=500)
    expected = scores_of_training(run_of(kind), user, item)
    scores = logits(open_run(run_of(kind)).model, user, item)
    assert np.std(expected) > 0.01
    np.testing.assert_allclose(scores, expected, atol=1e-6)


def test_the_prior_is_the_log_odds_of_the_training_labels(trained_run: Path) -> None:
    run = open_run(trained_run)
    label = np.concatenate([run.dataset.read(split)["label"].to_numpy() for split in ("train", "training_test")])
    assert run.prior == pytest.approx(np.log((label.sum() + 1) / ((1 - label).sum() + 1)))


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not a run folder, it has no config\.yaml"):
        open_run(tmp_path)


def test_a_run_without_a_checkpoint(trained_run: Path, tmp_path: Path) -> None:
    shutil.copytree(trained_run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    with pytest.raises(UserError, match="has no checkpoint: nothing was trained"):
        open_run(tmp_path / "run")


def test_the_run_of_another_data_set(trained_run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert prepare.main(["synthetic", "--output", str(other), "preset=tiny", "seed=1"]) == 0
    with pytest.raises(UserError, match=r"is not the data set that .* was trained on"):
        open_run(trained_run, [f"data.path={other}"])


def test_a_data_set_that_moved_is_found_by_its_new_path(trained_run: Path, tiny_data: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_data, tmp_path / "moved")
    run = open_run(trained_run, [f"data.path={tmp_path / 'moved'}"])
    assert run.dataset.path == str(tmp_path / "moved")


@pytest.mark.parametrize("setting", ["rows.dim=16", "model=neumf", "exposures.vectors=true"])
def test_settings_of_another_model_are_refused(trained_run: Path, setting: str) -> None:
    with pytest.raises(UserError, match=rf"was trained with {setting.partition('=')[0]}=\w+, which cannot change"):
        open_run(trained_run, [setting])


def test_a_strategy_that_scores_its_own_way_must_say_how() -> None:
    class Odd(Strategy):
        def score(self, pairs):  # pragma: no cover
            return pairs.user

    with pytest.raises(UserError, match="Odd overrides `score` but not `frozen`"):
        Odd.frozen(None, 3, {})
