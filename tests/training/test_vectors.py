"""The stage of exposure vectors: learned once for a data set, whatever happens meanwhile, and trained on alike."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from invdist import config as configs
from invdist import train
from invdist.config import Config
from invdist.config.registry import STRATEGIES
from invdist.data.dataset import Dataset
from invdist.embeddings.comm import Comm
from invdist.models.exposure_head import ExposureHead
from invdist.runtime.errors import UserError
from invdist.runtime.files import exclusive
from invdist.runtime.process import single_rank
from invdist.serving.run import open_run
from invdist.training import vectors as stage
from invdist.training.checkpoint.folder import CheckpointFolder
from invdist.training.run_folder import CONFIG_FILE, STOP_FILE
from invdist.training.vectors import finished_vectors, load_or_learn, vectors_folder
from tests.distributed import run_ranks
from tests.runs import train_here
from tests.training.test_trainer import _events, _interrupted, _train

_VECTORS = {"exposures__vectors": "true", "exposures__learned": 16, "exposures__dim": 8}
_SETTINGS = {"method": "none", "exposures": {"vectors": True, "learned": 16, "dim": 8, "products": 6}}
_CPU = torch.device("cpu")


def _config(data: Path, kept: Path, **exposures: Any) -> Config:
    given = [f"exposures.{name}={value}" for name, value in exposures.items()]
    return configs.from_mapping(_SETTINGS, [f"data.path={data}", f"exposures.path={kept}", *given])


@pytest.fixture(scope="module")
def comm() -> Iterator[Comm]:
    with single_rank():
        yield Comm()


class _Learning:
    """The stage on one rank, with what it reported."""

    def __init__(self, config: Config, comm: Comm, fail_at: int | None = None) -> None:
        self.products: list[int] = []
        self.fail_at = fail_at
        dataset = Dataset.open(config.data.path)
        self.folder = vectors_folder(config, dataset)
        self.rows = load_or_learn(config, dataset, device=_CPU, comm=comm, report=self._report).local_rows

    def _report(self, *, product: int, products: int, exposures: int, seconds: float) -> None:
        assert seconds > 0
        assert exposures > 3600
        self.products.append(product)
        if product == self.fail_at:
            raise KeyboardInterrupt


def test_they_are_learned_once_for_all_that_share_them(
    tiny_data: Path, all_labeled: Path, tmp_path: Path, comm: Comm
) -> None:
    first = _Learning(_config(tiny_data, tmp_path), comm)
    assert first.products == [1, 2, 3, 4, 5, 6]
    again = _Learning(_config(tiny_data, tmp_path), comm)
    assert again.products == []
    assert torch.equal(again.rows, first.rows)
    fewer = _Learning(_config(tiny_data, tmp_path, dim=4, hidden=7, gamma=0.5, prior=1.0), comm)
    assert fewer.products == []
    assert fewer.rows.shape == (len(first.rows), 8)
    # The leading columns, brought to length one by themselves, and the same counts.
    leading = torch.nn.functional.normalize(first.rows[:, :4], dim=1)
    torch.testing.assert_close(fewer.rows[:, :4], leading, rtol=0, atol=1e-5)
    assert torch.equal(fewer.rows[:, 4:], first.rows[:, 8:])
    lengths = first.rows[:, :8].norm(dim=1)
    assert ((lengths - 1).abs() < 1e-5).logical_or(first.rows[:, 8] == 0).all()
    # What decides them: their number, the products, and the data set.
    others = [_config(tiny_data, tmp_path, learned=20), _config(tiny_data, tmp_path, products=7)]
    for config in (*others, _config(all_labeled, tmp_path)):
        assert _Learning(config, comm).products == list(range(1, config.exposures.products + 1))
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("fail_at", [1, 2, 5, 6])
def test_a_killed_stage_goes_on_from_its_last_product(
    tiny_data: Path, tmp_path: Path, comm: Comm, fail_at: int
) -> None:
    whole = _Learning(_config(tiny_data, tmp_path / "whole"), comm)
    config = _config(tiny_data, tmp_path / "killed")
    with pytest.raises(KeyboardInterrupt):
        _Learning(config, comm, fail_at=fail_at)
    assert finished_vectors(vectors_folder(config, dataset := Dataset.open(str(tiny_data))), dataset) is None
    resumed = _Learning(config, comm)
    assert resumed.products == list(range(fail_at, 7))  # the product that was not saved is done again
    assert torch.equal(resumed.rows, whole.rows)


def test_a_second_run_waits_for_the_first(
    tiny_data: Path, tmp_path: Path, comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, dataset = _config(tiny_data, tmp_path), Dataset.open(str(tiny_data))
    folder = Path(vectors_folder(config, dataset))
    learned = Path(_Learning(_config(tiny_data, tmp_path / "elsewhere"), comm).folder)
    folder.mkdir(parents=True)
    held, release = threading.Event(), threading.Event()

    def first() -> None:
        with exclusive(folder):
            held.set()
            release.wait(30)
            # The first run finishes the vectors, and its lock goes.
            shutil.copytree(learned, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*"))

    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            release.set()
            thread.join()

    monkeypatch.setattr(stage.time, "sleep", sleep)
    thread = threading.Thread(target=first)
    thread.start()
    assert held.wait(10)
    second = _Learning(config, comm)
    assert len(looks) == 3
    assert second.products == []


def test_the_next_run_learns_when_the_first_one_died(tiny_data: Path, tmp_path: Path, comm: Comm) -> None:
    config, dataset = _config(tiny_data, tmp_path), Dataset.open(str(tiny_data))
    folder = Path(vectors_folder(config, dataset))
    folder.mkdir(parents=True)
    if (child := os.fork()) == 0:
        with exclusive(folder):
            os._exit(0)
    os.waitpid(child, 0)
    with stage._turn(str(folder), dataset, comm) as finished:
        assert not finished
        with pytest.raises(UserError, match="in use by another process"), exclusive(folder):
            pass


def test_damaged_vectors_are_learned_again(tiny_data: Path, tmp_path: Path, comm: Comm) -> None:
    whole = _Learning(_config(tiny_data, tmp_path), comm)
    for file in Path(whole.folder).rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-8])
    again = _Learning(_config(tiny_data, tmp_path), comm)
    assert again.products == [1, 2, 3, 4, 5, 6]
    assert torch.equal(again.rows, whole.rows)


def _flip_a_byte(folder: str | Path) -> None:
    for file in Path(folder).rglob("*.safetensors"):
        content = bytearray(file.read_bytes())
        content[-100] ^= 1
        file.write_bytes(content)


def test_vectors_with_another_byte_are_learned_again(
    tiny_data: Path, tmp_path: Path, comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which only reading them finds, also where learning stopped halfway."""
    whole = _Learning(_config(tiny_data, tmp_path), comm)
    _flip_a_byte(whole.folder)
    again = _Learning(_config(tiny_data, tmp_path), comm)
    assert again.products == [1, 2, 3, 4, 5, 6]
    assert torch.equal(again.rows, whole.rows)
    config = _config(tiny_data, tmp_path / "stopped")
    with pytest.raises(KeyboardInterrupt):
        _Learning(config, comm, fail_at=4)
    _flip_a_byte(tmp_path / "stopped")
    resumed = _Learning(config, comm)
    assert resumed.products == [1, 2, 3, 4, 5, 6]
    assert torch.equal(resumed.rows, whole.rows)
    monkeypatch.setattr(stage, "_intact", lambda comm, read: False)
    with pytest.raises(UserError, match="is damaged when it is read; check the disk"):
        _Learning(config, comm)


def test_vectors_of_another_data_set_are_refused(
    tiny_data: Path, all_labeled: Path, tmp_path: Path, comm: Comm
) -> None:
    learned = Path(_Learning(_config(tiny_data, tmp_path), comm).folder)
    config = _config(all_labeled, tmp_path)
    shutil.copytree(learned, vectors_folder(config, Dataset.open(str(all_labeled))))
    with pytest.raises(UserError, match="exposure vectors of another data set; remove the folder"):
        _Learning(config, comm)


def test_any_number_of_ranks_trains_the_same_model(tiny_data: Path, tmp_path: Path) -> None:
    """With the same vectors the weights are the same. Vectors that other ranks learned again differ by rounding."""
    kept, weights, finals = {1: tmp_path / "kept1", 2: tmp_path / "kept2"}, {}, {}
    for name, ranks, path in (("one", 1, kept[1]), ("two", 2, kept[1]), ("two, own vectors", 2, kept[2])):
        changes = {**_VECTORS, "exposures__path": str(path), "exposures__dropout": 0.0}
        trained = run_ranks(_train, ranks, str(tiny_data), str(tmp_path / name), changes)[0]
        weights[name], finals[name] = trained["weights"], trained["final"]["test"]["auc"]
        learned = _events(tmp_path / name, "vectors")
        assert [event["product"] for event in learned] == ([] if name == "two" else list(range(1, 15)))
        assert {event["exposures"] for event in learned} <= {_exposures(tiny_data)}
    np.testing.assert_allclose(weights["two"], weights["one"], rtol=0, atol=1e-5)
    vectors = {ranks: _saved(path) for ranks, path in kept.items()}
    for table, rows in vectors[2].items():
        np.testing.assert_allclose(rows, vectors[1][table], rtol=0, atol=1e-6)
    # Adam divides by the size of a gradient. A hidden unit that is seldom active has tiny ones, so its weights turn a
    # rounding of 1e-7 in the vectors into 1e-4; few do.
    difference = np.abs(weights["two, own vectors"] - weights["one"])
    assert difference.mean() < 1e-6
    assert (difference > 1e-5).mean() < 0.01
    assert finals["two, own vectors"] == pytest.approx(finals["one"], abs=1e-5)


def test_a_rank_may_have_no_pairs_in_a_step(tiny_data: Path, tmp_path: Path) -> None:
    """Two ranks, 3,600 pairs, and a step for the last one."""
    more = {"method": "none", "data__batch_size": 3599, "training__epochs": 1, "exposures__dropout": 0.0}
    changes = {**_VECTORS, **more, "exposures__products": 2, "exposures__path": str(tmp_path / "kept")}
    one, two = (run_ranks(_train, ranks, str(tiny_data), str(tmp_path / str(ranks)), changes)[0] for ranks in (1, 2))
    assert set(two["steps"].values()) == {2}
    np.testing.assert_allclose(two["weights"], one["weights"], rtol=0, atol=1e-5)


def _saved(kept: Path) -> dict[str, np.ndarray]:
    """The vectors in the one folder there is."""
    (folder,) = kept.iterdir()
    found = CheckpointFolder(folder).latest(valid_only=True)
    assert found is not None
    return {table: found.read_rows(table, slice(None)) for table in ("user", "item")}


def _exposures(data: Path) -> int:
    rows = Dataset.open(str(data)).rows
    return rows["train"] + rows["training_test"] + rows["unclear"]


@pytest.mark.parametrize(
    ("changes", "stop_after"), [({"method": "ig"}, 36), ({"method": "none", "model": "neumf"}, 11)]
)
def test_a_stopped_run_resumes_to_identical_weights(
    tiny_data: Path, tmp_path: Path, changes: dict[str, Any], stop_after: int
) -> None:
    changes = {**_VECTORS, "exposures__path": str(tmp_path / "kept"), **changes}
    whole = run_ranks(_train, 2, str(tiny_data), str(tmp_path / "whole"), changes)
    run = tmp_path / "stopped"
    assert run_ranks(_interrupted, 2, str(tiny_data), str(run), changes, stop_after)[0]["stopped"]
    assert _events(run, "vectors") == []  # the first run has learned them
    (run / STOP_FILE).unlink()
    resumed = run_ranks(_train, 2, str(tiny_data), str(run), changes)
    np.testing.assert_array_equal(resumed[0]["weights"], whole[0]["weights"])
    assert resumed[0]["final"]["test"] == whole[0]["final"]["test"]


def test_a_run_whose_vectors_are_gone_says_so(tiny_data: Path, tmp_path: Path) -> None:
    given = ("exposures.vectors=true", "training.epochs=1", f"exposures.path={tmp_path / 'kept'}")
    run = train_here(tiny_data, tmp_path / "run", *given)
    (tmp_path / "kept").rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"exposure vectors of the run are not in .*exposures.path="):
        open_run(run)
    assert open_run(run, [f"exposures.path={tmp_path / 'moved'}"]).model.user.isfinite().all()
    final = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert final["test"]["auc"] > 0.5


@pytest.mark.parametrize(
    ("then", "unknown"),
    [("exposures.shrink=false", ("shrink", "version")), ("exposures.version=2", ("version",))],
    ids=["before they were shrunk", "before they were shrunk smoothly"],
)
def test_a_run_of_an_earlier_version_reads_its_own(
    tiny_data: Path, tmp_path: Path, then: str, unknown: tuple[str, ...]
) -> None:
    given = ("exposures.vectors=true", "training.epochs=1", f"exposures.path={tmp_path / 'kept'}")
    run = train_here(tiny_data, tmp_path / "old", *given, then)
    settings, kept = run / CONFIG_FILE, open_run(run).model
    lines = settings.read_text().splitlines(True)
    settings.write_text("".join(line for line in lines if not any(f"  {name}:" in line for name in unknown)))
    assert len(settings.read_text().splitlines()) == len(lines) - len(unknown)
    assert not list((tmp_path / "kept").glob("*-v3"))  # what a new run would read
    torch.testing.assert_close(open_run(run).model.user, kept.user, rtol=0, atol=0)


def test_every_strategy_trains_with_them_by_one_setting(tiny_data: Path, tmp_path: Path) -> None:
    """All share one set of vectors. The means are counts: they read none."""
    for method in STRATEGIES.names():
        given = ("exposures.vectors=true", "training.epochs=1", f"exposures.path={tmp_path / 'kept'}")
        run = train_here(tiny_data, tmp_path / method, f"method={method}", *given)
        if method == "means":
            continue
        model = open_run(run).model
        assert isinstance(model.backbone, ExposureHead)
        assert model.backbone.hidden.weight.isfinite().all()
        own = model.user[:, model.backbone.inner.columns : model.backbone.columns]
        assert own.abs().sum() > 0  # the head's columns have learned
    (folder,) = (tmp_path / "kept").iterdir()
    assert folder.is_dir()


def test_a_folder_that_cannot_be_made_is_refused_before_anything_starts(
    tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    where = f"exposures.path={tmp_path / 'file' / 'vectors'}"
    assert train.main([f"data.path={tiny_data}", f"runs={tmp_path / 'runs'}", "exposures.vectors=true", where]) == 2
    assert f"exposures.path: cannot make {tmp_path / 'file' / 'vectors'}: Not a directory" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_written_is_refused_unless_the_vectors_are_there(
    tiny_data: Path, tmp_path: Path, comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for root nothing is read-only, `os.access` says so here."""
    config, dataset = _config(tiny_data, tmp_path), Dataset.open(str(tiny_data))
    monkeypatch.setattr(stage.os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match=f"exposures.path: cannot write to {tmp_path}"):
        stage.check_folder(config, dataset)
    _Learning(config, comm)
    stage.check_folder(config, dataset)
