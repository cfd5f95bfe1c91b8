"""What a store of checkpoints promises: what is kept, what is found, what is refused, and who else can read it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.fs as pafs
import pytest
import torch
from safetensors import safe_open

from invdist.cli import bench
from invdist.learning.strategy import Strategy
from invdist.runtime.errors import UserError
from invdist.runtime.files import Folder
from invdist.training.checkpoint import CheckpointStore, DamagedCheckpoint, Position, read_checkpoint, writer
from invdist.training.checkpoint import store as checkpoint_store
from tests.training.checkpointing import ITEMS, USERS, build, held, same, this_process, train


@pytest.fixture(autouse=True, scope="module")
def _alone() -> Iterator[None]:
    with this_process():
        yield


@pytest.fixture(scope="module")
def strategy() -> Strategy:
    """A model with a few steps behind it, so that nothing in it is zero."""
    strategy = build(model="neumf")
    train(strategy, range(3))
    return strategy


def save(store: CheckpointStore, strategy: Strategy, step: int, metric: float | None = None) -> None:
    store.save(strategy.model, strategy, Position(global_step=step), {"step": step}, metric)
    store.wait()


def steps(store: CheckpointStore) -> list[int]:
    return [info.step for info in store.list()]


def flip(path: Path) -> None:
    """Changes the last byte of a file."""
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def test_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "none yet", None)
    assert (store.latest(), store.best(), store.list()) == (None, None, [])
    store.wait()


def test_newest_and_best_are_kept(tmp_path: Path, strategy: Strategy) -> None:
    store = CheckpointStore(tmp_path, None, keep_last=2, keep_best=1)
    for step, metric in enumerate([0.5, 0.9, 0.9, float("nan"), None, 0.8]):
        save(store, strategy, step, metric)
    assert steps(store) == [1, 4, 5]
    latest, best = store.latest(), store.best()
    assert latest is not None
    assert (latest.step, latest.metric, latest.extra) == (5, 0.8, {"step": 5})
    assert best is not None
    assert best.step == 1
    assert sorted(os.listdir(tmp_path)) == ["step-000000001", "step-000000004", "step-000000005"]


def test_same_step_is_replaced(tmp_path: Path, strategy: Strategy) -> None:
    store = CheckpointStore(tmp_path, None)
    save(store, strategy, 3)
    save(store, strategy, 3, 0.5)
    assert [info.metric for info in store.list()] == [0.5]
    assert os.listdir(tmp_path) == ["step-000000003"]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_saved_is_the_moment_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    strategy, extra, trained_on = build(), {"history": [1]}, threading.Event()
    train(strategy, range(2))
    store, before = CheckpointStore(tmp_path, None, asynchronous=asynchronous), held(strategy)
    if asynchronous:  # nothing is written before training has gone on
        monkeypatch.setattr(
            checkpoint_store, "write_slices", lambda *a: trained_on.wait(10) and writer.write_slices(*a)
        )
    store.save(strategy.model, strategy, Position(), extra)
    train(strategy, range(2, 4))
    extra["history"].append(2)
    trained_on.set()
    store.wait()
    info = store.latest()
    assert info is not None
    assert store.load(info, strategy.model, strategy) == (Position(), {"history": [1]})
    assert same(held(strategy), before)


def test_leftovers_of_interrupted_saves_are_no_checkpoints_and_go(tmp_path: Path, strategy: Strategy) -> None:
    store = CheckpointStore(tmp_path, None)
    save(store, strategy, 1)
    partial, bare = tmp_path / "step-000000002.partial", tmp_path / "step-000000003"
    for folder in (partial, bare):
        folder.mkdir()
        (folder / "rank-0.safetensors").write_bytes(b"half")
    (partial / "manifest.json").write_text((tmp_path / "step-000000001" / "manifest.json").read_text())
    latest = store.latest()
    assert latest is not None
    assert latest.step == 1
    save(store, strategy, 4)
    assert not partial.exists()
    assert steps(store) == [1, 4]


def test_damage_is_named_and_passed_over_only_when_told(tmp_path: Path, strategy: Strategy) -> None:
    store = CheckpointStore(tmp_path, None, keep_last=3)
    for step in range(3):
        save(store, strategy, step)
    damaged = tmp_path / "step-000000002" / "rank-0.safetensors"
    flip(damaged)
    newest = store.latest()
    assert newest is not None
    with pytest.raises(DamagedCheckpoint, match=r"step-000000002/rank-0\.safetensors is damaged: its checksum"):
        store.load(newest, strategy.model, strategy)
    position, _ = store.load(newest, strategy.model, strategy, fallback=True)
    assert position.global_step == 1

    with open(damaged, "r+b") as file:
        file.truncate(100)
    with pytest.raises(DamagedCheckpoint, match=r"rank-0\.safetensors has 100 bytes, the manifest says \d+"):
        store.latest()
    whole = store.latest(valid_only=True)
    assert whole is not None
    assert whole.step == 1
    damaged.unlink()
    with pytest.raises(DamagedCheckpoint, match=r"rank-0\.safetensors is missing"):
        store.latest()

    # Training goes on from step 1: the damaged step 2 must not be found again by the next restart.
    save(store, strategy, 1)
    assert steps(store) == [0, 1]
    assert (tmp_path / "step-000000002.abandoned").is_dir()


def test_a_checkpoint_is_selected_by_name_or_step(tmp_path: Path, strategy: Strategy) -> None:
    store = CheckpointStore(tmp_path, None, keep_last=9)
    with pytest.raises(UserError, match="has no checkpoint"):
        store.select("last")
    for step, metric in enumerate([None, 0.9, 0.5]):
        save(store, strategy, step, metric)
    assert [store.select(which).step for which in ("best", "last", 0, "0", 2)] == [1, 2, 0, 0, 2]
    for which in ("newest", 7, "-1", "1.0", ""):
        with pytest.raises(UserError, match=rf"--checkpoint {which}: expected best, last or a step of .*: 0, 1, 2$"):
            store.select(which)
    unmeasured = CheckpointStore(tmp_path / "unmeasured", None)
    save(unmeasured, strategy, 4)
    save(unmeasured, strategy, 5)
    assert unmeasured.select("best").step == 5


@pytest.mark.parametrize("way", ["truncate", "unlink", "link", "manifest", "flip"])
def test_a_damaged_choice_is_never_replaced_by_another(tmp_path: Path, strategy: Strategy, way: str) -> None:
    store = CheckpointStore(tmp_path / "of run", None, keep_last=9)
    for step, metric in enumerate([0.5, 0.9, 0.7]):
        save(store, strategy, step, metric)
    file = tmp_path / "of run/step-000000001/rank-0.safetensors"
    if way == "truncate":
        os.truncate(file, 100)
    elif way == "manifest":
        (file.parent / "manifest.json").write_text("{")
    elif way == "flip":
        flip(file)
    else:
        file.rename(tmp_path / "elsewhere")
        if way == "link":
            file.symlink_to(tmp_path / "elsewhere")
    for which in ("best", 1):
        with pytest.raises(DamagedCheckpoint, match=r"; choose an intact one with --checkpoint STEP: 0, 2$"):
            store.select(which).read_rows("user", slice(None))
    assert store.select("last").step == 2
    assert store.select(0).read_rows("user", slice(None)).shape == (USERS, 40)
    os.truncate(tmp_path / "of run/step-000000002/rank-0.safetensors", 100)
    if way != "manifest":  # whose metric would be needed
        os.truncate(tmp_path / "of run/step-000000000/rank-0.safetensors", 100)
        with pytest.raises(DamagedCheckpoint, match=r"; no other is intact$"):
            store.select("best").read_rows("user", slice(None))


def test_load_gives_up_when_none_is_whole(tmp_path: Path, strategy: Strategy) -> None:
    store = CheckpointStore(tmp_path, None)
    for step in range(2):
        save(store, strategy, step)
        flip(tmp_path / f"step-{step:09d}" / "rank-0.safetensors")
    newest = store.latest()
    assert newest is not None
    with pytest.raises(DamagedCheckpoint, match="step-000000000"):
        store.load(newest, strategy.model, strategy, fallback=True)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"users": 24}, r"rows/user/weight: F32 23 x 40 there, F32 24 x 40 here"),
        ({"dim": 12}, r"dense/tower.0.weight: F32 32 x 64 there, F32 48 x 96 here"),
        ({"model": "gmf"}, r"dense/tower.0.weight: F32 32 x 64 there, nothing here"),
        ({"optimizer": "sgd"}, r"its rows.optimizer is Adam, this run's SGD.*rows/item/m: F32 31 x 40 there, nothing"),
        ({"method": "t_ce"}, r"its strategy is LogLoss, this run's Truncated"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, strategy: Strategy, other: dict, message: str) -> None:
    store = CheckpointStore(tmp_path, None)
    save(store, strategy, 1)
    save(store, strategy, 2)
    stranger = build(**{"model": "neumf", **other})
    before, info = held(stranger), store.latest()
    assert info is not None
    with pytest.raises(UserError, match=message) as caught:
        store.load(info, stranger.model, stranger, fallback=True)
    assert not isinstance(caught.value, DamagedCheckpoint)
    assert same(held(stranger), before)


def test_another_version_is_refused(tmp_path: Path, strategy: Strategy) -> None:
    store = CheckpointStore(tmp_path, None)
    save(store, strategy, 1)
    manifest = tmp_path / "step-000000001" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 3}))
    with pytest.raises(UserError, match="version 3, but this invdist reads versions 1 and 2"):
        store.latest()


def test_files_of_bounded_size_that_others_can_read(
    tmp_path: Path, strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_FILE_BYTES", 1000)
    monkeypatch.setattr(writer, "_SMALL_BYTES", 500)
    save(CheckpointStore(tmp_path, None), strategy, 1)
    rows, folder = strategy.model.rows, tmp_path / "step-000000001"
    found: dict[str, np.ndarray] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
        if path.name.startswith("rows-"):
            assert path.stat().st_size < 1200
    user = rows.local_rows[:USERS].numpy()
    parts = [(key, value) for key, value in found.items() if key.startswith("rows/user/weight[")]
    parts.sort(key=lambda part: int(part[0].partition("[")[2].partition(":")[0]))
    assert len(parts) == 4
    assert (np.concatenate([value for _, value in parts]) == user).all()

    info = read_checkpoint(folder)
    item = rows.local_rows[USERS:].numpy()
    assert (info.read_rows("item", slice(5, 20)) == item[5:20]).all()
    assert (info.read_rows("item", slice(None)) == item).all()
    assert info.read_rows("user", slice(USERS, None)).shape == (0, 40)
    dense = info.read_dense()
    assert dense.keys() == strategy.model.backbone.state_dict().keys()
    assert all(torch.equal(dense[n], v) for n, v in strategy.model.backbone.state_dict().items())
    assert info.read_strategy_state() == {}
    assert [(t.name, t.rows) for t in info.manifest.tables] == [("user", USERS), ("item", ITEMS)]
    with pytest.raises(UserError, match="no table 'video'; it has user, item"):
        info.read_rows("video", slice(1))


def test_filesystem_that_cannot_rename(tmp_path: Path, strategy: Strategy) -> None:
    # Not a local filesystem to the store, as `s3://` is not: the manifest alone commits.
    folder = Folder(pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem()), "runs/a")
    store = CheckpointStore(folder, None, keep_last=2)
    for step in range(3):
        save(store, strategy, step)
    assert steps(store) == [1, 2]
    other = build(model="neumf", seed=3)
    info = store.latest()
    assert info is not None
    store.load(info, other.model, other)
    assert same(held(other), held(strategy))
    (tmp_path / "runs/a/step-000000002/manifest.json").unlink()
    assert steps(store) == [1]
    save(store, strategy, 3)
    assert steps(store) == [1, 3]
    assert sorted(os.listdir(tmp_path / "runs/a")) == ["step-000000001", "step-000000003"]


def test_uri_and_what_cannot_be_reached(tmp_path: Path, strategy: Strategy) -> None:
    save(CheckpointStore(f"file://{tmp_path}/a", None), strategy, 1)
    assert read_checkpoint(tmp_path / "a" / "step-000000001").step == 1
    with pytest.raises(UserError, match="cannot reach nosuch://bucket/x"):
        CheckpointStore("nosuch://bucket/x", None)
    with pytest.raises(UserError, match=r"is not a checkpoint: it has no manifest\.json"):
        read_checkpoint(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"step 1 was not saved in .*file: .*there is no other checkpoint"):
        save(CheckpointStore(tmp_path / "file", None), strategy, 1)


def test_bench_says_how_long_a_save_holds_up_a_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert bench.main(["checkpoint", "--rows", "2000", "--json", "--folder", str(tmp_path)]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["bytes"] > 2000 * 32 * 4 * 3
    assert min(figures[name] for name in ("first_save_blocks_s", "save_blocks_s", "background_write_s", "load_s")) > 0
    assert os.listdir(tmp_path) == []
