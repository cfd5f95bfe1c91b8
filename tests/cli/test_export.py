"""`invdist export`: the program scores in an interpreter that has no invdist, the tensors open with safetensors."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from invdist.cli import export
from invdist.data.dataset import Dataset
from invdist.serving.export import scoring_program
from invdist.serving.run import open_run
from invdist.serving.scoring import logits
from tests.runs import train_here, trained_strategy

CLEAN = """
import sys

class NoInvdist:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("invdist", "torchrec", "ray", "pyarrow"):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, NoInvdist())
import numpy as np
import torch

folder = sys.argv[1]
scorer = torch.export.load(f"{folder}/scorer.pt2").module()
pairs = torch.from_numpy(np.load(f"{folder}/pairs.npy"))
scores = [scorer(*pairs[:, :rows]).numpy() for rows in (1, 2, pairs.shape[1])]
assert not any(name.split(".")[0] == "invdist" for name in sys.modules)
np.save(f"{folder}/scores.npy", np.concatenate(scores))
"""


@pytest.fixture(scope="module")
def exported(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "gmf"
    assert export.main(["--run", str(trained_run), "--output", str(folder)]) == 0
    return folder


def test_the_program_scores_without_invdist(exported: Path, trained_run: Path) -> None:
    source = np.random.default_rng(0)
    pairs = np.stack([source.integers(200, size=1000), source.integers(300, size=1000)])
    np.save(exported / "pairs.npy", pairs)
    done = subprocess.run([sys.executable, "-I", "-c", CLEAN, str(exported)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    model = open_run(trained_run).model
    expected = [logits(model, *pairs[:, :rows]) for rows in (1, 2, 1000)]
    np.testing.assert_array_equal(np.load(exported / "scores.npy"), np.concatenate(expected))


def test_the_tensors_are_those_of_the_checkpoint(exported: Path, trained_run: Path) -> None:
    tensors = load_file(exported / "model.safetensors")
    with trained_strategy(trained_run) as strategy:
        model = strategy.model
        rows = np.concatenate([tensors["user"], tensors["item"]])
        np.testing.assert_array_equal(rows, model.rows.local_rows.numpy())
        for name, value in model.backbone.state_dict().items():
            np.testing.assert_array_equal(tensors[f"backbone.{name}"], value.numpy())


def test_the_card_says_what_it_is(exported: Path, trained_run: Path, tiny_data: Path) -> None:
    card = json.loads((exported / "card.json").read_text())
    dataset = Dataset.open(str(tiny_data))
    final = json.loads((trained_run / "metrics.jsonl").read_text().splitlines()[-1])
    assert card["metrics"]["test"] == final["test"]
    assert card["dataset"]["fingerprint"] == dataset.fingerprint
    assert card["config"]["rows"]["dim"] == 8
    assert (card["method"], card["model"]) == ("ig", "gmf")
    assert card["checkpoint"]["epoch"] == final["best_epoch"]  # counted as in the terminal and the report
    assert card["checkpoint"]["step"] == int(final["checkpoint"][-9:])
    for name, entry in card["files"].items():
        content = (exported / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (entry["bytes"], entry["sha256"])
    assert pq.read_table(exported / "items.parquet")["raw"].to_pylist() == dataset.raw_ids("items").to_pylist()


@pytest.mark.parametrize(
    "settings",
    [
        ("model=neumf", "method=none", "rows.bias=true"),
        ("method=means",),
        ("method=ig", "exposures.vectors=true", "exposures.dim=16"),
        ("model=neumf", "method=none", "exposures.vectors=true"),
    ],
)
def test_every_kind_of_model_becomes_a_program(tiny_data: Path, tmp_path: Path, settings: tuple[str, ...]) -> None:
    model = open_run(train_here(tiny_data, tmp_path / "run", "training.epochs=1", *settings)).model
    exported = scoring_program(model)
    # Frozen columns are in the tables of the program, too.
    assert exported.state_dict["user"].shape == (200, model.backbone.columns + model.backbone.frozen_columns)
    program = exported.module()
    user, item = (model.user.new_tensor(values).long() for values in ([0, 7, 199], [299, 3, 3]))
    # Called alike: the last bits of `logits`, which pads pairs to tiles, may be others.
    np.testing.assert_array_equal(program(user, item).numpy(), model(user, item).numpy())


def test_an_export_is_not_overwritten(exported: Path, trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export.main(["--run", str(trained_run), "--output", str(exported)]) == 2
    assert "is already there" in capsys.readouterr().err


def test_the_card_of_another_checkpoint_has_not_the_metrics_of_the_best(trained_run: Path, tmp_path: Path) -> None:
    best = open_run(trained_run).checkpoint.step
    steps = [int(folder.name[5:]) for folder in (trained_run / "checkpoints").glob("step-*")]
    other = next(step for step in steps if step != best)
    given = ["--run", str(trained_run), "--output", str(tmp_path / "out"), "--checkpoint", str(other)]
    assert export.main(given) == 0
    card = json.loads((tmp_path / "out" / "card.json").read_text())
    assert card["checkpoint"]["step"] == other
    assert card["metrics"] == {"valid": None, "test": None}
