"""`invdist evaluate`: the figures of training, the catalogue against brute force, and the rule for checkpoints."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from invdist.cli import evaluate, prepare
from invdist.data.dataset import Dataset
from tests.conftest import REPOSITORY
from tests.runs import train_here


def _json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    capsys.readouterr()
    assert evaluate.main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def _error(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert evaluate.main(list(map(str, arguments))) == 2
    return capsys.readouterr().err


def _final(run: Path) -> dict[str, Any]:
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])


def _steps(run: Path) -> list[int]:
    return sorted(int(folder.name[5:]) for folder in (run / "checkpoints").glob("step-*"))


@pytest.fixture
def copied(trained_run: Path, tmp_path: Path) -> Path:
    """The run, to be damaged."""
    return Path(shutil.copytree(trained_run, tmp_path / "run"))


@pytest.mark.parametrize("split", ["valid", "test"])
@pytest.mark.parametrize(
    "settings",
    [
        ("method=ig",),
        ("method=means",),
        ("method=ig", "exposures.vectors=true"),
        ("method=none", "model=neumf", "tower.dropout=0.3"),
        ("method=none", "model=neumf", "exposures.vectors=true", "training.precision=bf16"),
        ("method=none", "model=neumf", "training.precision=bf16"),
    ],
)
def test_it_is_what_training_reports(
    tiny_data: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
    settings: tuple[str, ...],
    split: str,
) -> None:
    run = _run_of(tiny_data, tmp_path_factory, settings)
    expected = _final(run)[split]
    found = _json(capsys, "--run", run, "--split", split)
    assert expected.pop("auc_error_bound", 0) == 0  # histograms are for more rows
    # Training computes the head of vectors in parts, so two scores that are equal up to rounding may change places.
    tolerance = 5e-6 if "exposures.vectors=true" in settings else 1e-6
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=tolerance)
    assert "auc_error_bound" not in found


_RUNS: dict[tuple[str, ...], Path] = {}


def _run_of(data: Path, folders: pytest.TempPathFactory, settings: tuple[str, ...]) -> Path:
    if settings not in _RUNS:
        _RUNS[settings] = train_here(data, folders.mktemp("runs") / "run", "training.epochs=2", *settings)
    return _RUNS[settings]


def test_the_table_is_for_people(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main(["--run", str(trained_run)]) == 0
    printed = capsys.readouterr()
    assert f"AUC              {_final(trained_run)['test']['auc']:.4f}".split() in [
        line.split() for line in printed.out.splitlines()
    ]
    assert "NDCG@10" in printed.out
    assert "ERROR_BOUND" not in printed.out.upper()
    assert printed.err.startswith(f"checkpoint: {trained_run}/checkpoints/step-")


def _cpu_seconds(*arguments: str) -> float:
    """CPU time of this Python with `arguments`: unlike wall-clock time it does not depend on the load."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_it_takes_little_more_than_importing_torch(trained_run: Path) -> None:
    """No trainer, TorchRec or Ray is imported, so a small run takes seconds: half a minute it was."""
    code = (
        "import sys; from invdist.cli.evaluate import main; assert main(sys.argv[1:]) == 0; "
        "names = [m for m in sys.modules if m.split('.')[0] in ('torchrec', 'fbgemm_gpu', 'ray')]; "
        "names += [m for m in ('invdist.training.trainer', 'invdist.training.ray_backend') if m in sys.modules]; "
        "assert not names, names"
    )
    assert _cpu_seconds("-c", code, "--run", str(trained_run)) <= 2.5 * _cpu_seconds("-c", "import torch")


# The whole catalogue


def _brute_force(scores: np.ndarray, dataset: Dataset, split: str, k: int) -> dict[str, float]:
    """The metrics by their definitions, user by user, over a dense matrix of scores."""
    seen, relevant = (np.zeros(scores.shape, bool) for _ in range(2))
    for name in ("train", "training_test"):
        table = dataset.read(name)
        seen[table["user"].to_numpy(), table["item"].to_numpy()] = True
    table = dataset.read(split)
    positive = table["label"].to_numpy() == 1
    relevant[table["user"].to_numpy()[positive], table["item"].to_numpy()[positive]] = True
    relevant &= ~seen
    found: dict[str, list[float]] = {"recall": [], "hit_rate": [], "ndcg": [], "mrr": []}
    shown: set[int] = set()
    for user in range(len(scores)):
        if not relevant[user].any():
            continue
        best = sorted((i for i in range(scores.shape[1]) if not seen[user, i]), key=lambda i: -scores[user, i])[:k]
        shown.update(best)
        hits = [bool(relevant[user, i]) for i in best]
        ideal = sum(1 / np.log2(r + 2) for r in range(min(k, int(relevant[user].sum()))))
        found["recall"].append(sum(hits) / relevant[user].sum())
        found["hit_rate"].append(float(any(hits)))
        found["ndcg"].append(sum(1 / np.log2(r + 2) for r, hit in enumerate(hits) if hit) / ideal)
        found["mrr"].append(1 / (hits.index(True) + 1) if any(hits) else 0.0)
    result = {f"{name}@{k}": float(np.mean(values)) for name, values in found.items()}
    return {**result, f"coverage@{k}": len(shown) / scores.shape[1], "users": len(found["recall"])}


@pytest.mark.parametrize("split", ["test", "valid"])
def test_the_catalogue_is_ranked_as_by_brute_force(
    trained_run: Path, tiny_data: Path, every_score: np.ndarray, capsys: pytest.CaptureFixture[str], split: str
) -> None:
    found = _json(capsys, "--run", trained_run, "--split", split, "--catalogue", "--k", "20", "5")
    dataset = Dataset.open(str(tiny_data))
    for k in (5, 20):
        expected = _brute_force(every_score, dataset, split, k)
        assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-9)
        assert 0 < found[f"recall@{k}"] < found[f"hit_rate@{k}"] < 1
    assert found["items"] == dataset.items
    assert found["users"] + found["users_left_out"] == len(set(dataset.read(split)["user"].to_pylist()))


def test_the_catalogue_as_a_table(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main(["--run", str(trained_run), "--catalogue"]) == 0
    printed = capsys.readouterr().out
    for title in ("Recall@10", "HitRate@10", "NDCG@10", "MRR@10", "coverage@10", "train, training_test"):
        assert title in printed
    assert "GAUC" not in printed


def test_lists_that_cannot_be(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--k is the length of the lists of --catalogue" in _error(capsys, "--run", trained_run, "--k", "5")
    assert "at least 1" in _error(capsys, "--run", trained_run, "--catalogue", "--k", "10", "0")
    assert "more than the 300 items" in _error(capsys, "--run", trained_run, "--catalogue", "--k", "301")


# Checkpoints


def test_a_checkpoint_is_chosen_and_recorded(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = int(_final(trained_run)["checkpoint"][-9:])
    steps = _steps(trained_run)
    found = {which: _json(capsys, "--run", trained_run, "--checkpoint", which) for which in ("best", "last")}
    assert found["best"] == _json(capsys, "--run", trained_run)
    assert found["best"]["checkpoint"]["step"] == best
    assert found["last"]["checkpoint"]["step"] == steps[-1]
    for step in steps:
        assert _json(capsys, "--run", trained_run, "--checkpoint", str(step))["checkpoint"]["step"] == step
    error = _error(capsys, "--run", trained_run, "--checkpoint", "123456")
    assert ", ".join(map(str, steps)) in error
    assert "expected best, last or a step" in _error(capsys, "--run", trained_run, "--checkpoint", "newest")


def _flip(folder: Path) -> None:
    content = bytearray((folder / "rank-0.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "rank-0.safetensors").write_bytes(content)


def _link(folder: Path) -> None:
    (folder / "rank-0.safetensors").rename(folder.parent.parent / "elsewhere")
    (folder / "rank-0.safetensors").symlink_to(folder.parent.parent / "elsewhere")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped byte": _flip,
    "truncated": lambda folder: os.truncate(folder / "rank-0.safetensors", 100),
    "linked": _link,
    "missing": lambda folder: (folder / "rank-0.safetensors").unlink(),
    "flipped manifest": lambda folder: (folder / "manifest.json").write_text("{"),
    "missing manifest": lambda folder: (folder / "manifest.json").unlink(),
    "missing folder": shutil.rmtree,
}


@pytest.mark.parametrize("way", DAMAGE)
def test_damage_is_an_error_that_names_what_works(copied: Path, capsys: pytest.CaptureFixture[str], way: str) -> None:
    best = int(_final(copied)["checkpoint"][-9:])
    others = [step for step in _steps(copied) if step != best]
    assert others
    DAMAGE[way](copied / "checkpoints" / f"step-{best:09d}")
    for which in ("best", str(best)):
        error = _error(capsys, "--run", copied, "--checkpoint", which)
        assert error.startswith("error: ")
        assert f": {', '.join(map(str, others))}" in error
    for step in others:
        assert _json(capsys, "--run", copied, "--checkpoint", str(step))["checkpoint"]["step"] == step


# The data set


def test_another_data_set_is_told_by_what_was_given(
    copied: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    assert prepare.main(["synthetic", "--output", str(other), "preset=tiny", "seed=1"]) == 0
    error = _error(capsys, "--run", copied, f"data.path={other}")
    assert f"data.path={other} is not the data set" in error
    assert "leave data.path out" in error
    assert "add data.path" not in error
    config = copied / "config.yaml"
    config.write_text(config.read_text().replace(str(tiny_data), str(other)))
    error = _error(capsys, "--run", copied)
    assert f"{other} is not the data set that {copied} was trained on, it has changed since" in error
    assert "as data.path=FOLDER" in error
    assert _json(capsys, "--run", copied, f"data.path={tiny_data}")["rows"] > 0
