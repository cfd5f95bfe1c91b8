"""The recipe for one's own data, as the README gives it, with no setting changed: it ends above the means."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from invdist import config as configs
from invdist.cli import prepare
from invdist.data.dataset import Dataset
from invdist.runtime.process import single_rank
from invdist.training import run_folder
from invdist.training.sizes import suited
from invdist.training.trainer import Trainer
from tests.messy_log import write_messy_log


def _final(data: Path, repository: Path) -> dict:
    """The final event of `invdist train --config configs/own-data.yaml data.path=DATA`, on one rank without Ray."""
    given = [f"data.path={data}", f"runs={data.parent}", "name=run", "ray.workers=1", "data.readers=0"]
    dataset = Dataset.open(str(data))
    config = suited(configs.load(repository / "configs" / "own-data.yaml", given), dataset)
    with single_rank():
        return Trainer(config, run_folder.create(config, dataset), device=torch.device("cpu")).fit()


def _above_the_means(final: dict, margin: float) -> None:
    for split in ("valid", "test"):
        assert final[split]["auc"] > final["means"][split]["auc"] + margin


@pytest.mark.slow
def test_a_messy_log_of_twelve_thousand_lines(repository: Path, tmp_path: Path) -> None:
    log, data = tmp_path / "plays.csv", tmp_path / "data"
    write_messy_log(log)
    columns = ["columns.user=user id", "columns.item=video id", "columns.play_time=watched", "play_time_unit=s"]
    arguments = ["microvideo", "--input", str(log), "--output", str(data), "delimiter=;", "encoding=latin-1", *columns]
    assert prepare.main(arguments) == 0
    dataset = Dataset.open(str(data))
    counts = dataset.manifest["counts"]
    assert (counts["log_rows"], counts["missing_ids"]) == (12_000, 100)
    assert min(counts["bad_durations"], counts["bad_play_times"], counts["exact_duplicates"]) > 0
    assert {"NA", "00001", "Zoë 2"} <= set(dataset.raw_ids("users").to_pylist())
    _above_the_means(_final(data, repository), margin=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ml-1m", "kuairand"])
def test_real_logs_with_a_label_in_twenty(name: str, shared_data: Path, repository: Path, tmp_path: Path) -> None:
    days = ["rule=long_view", "split=date", "valid_from=2022-04-25", "test_from=2022-04-28"]
    source, options = {"ml-1m": ("ml-1m.zip", []), "kuairand": ("kuairand-pure", days)}[name]
    data = tmp_path / "data"
    arguments = [name, "--input", str(shared_data / source), "--output", str(data), "label_fraction=0.05", *options]
    assert prepare.main(arguments) == 0
    _above_the_means(_final(data, repository), margin=0.02)
