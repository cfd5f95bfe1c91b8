"""Checkpoints that hold only the rows changed since the last full one: the same bits, nothing lost."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from invdist.embeddings.comm import Comm
from invdist.learning.strategy import Strategy
from invdist.runtime.errors import UserError
from invdist.training.checkpoint import CheckpointStore, DamagedCheckpoint, Position, read_checkpoint
from invdist.training.checkpoint.writer import Staging
from tests.distributed import run_ranks
from tests.embeddings.sharded import SHARDINGS, sharding_options
from tests.training.checkpointing import assembled, build, held, same, this_process, train
from tests.training.test_hostile_checkpoint import FUZZ, JSON, manifest_of, places, put, replaced

LARGE: dict[str, Any] = {"users": 4000, "items": 3000}  # the steps of `train` touch few of them


def save(store: CheckpointStore, strategy: Strategy, step: int, metric: float | None = None) -> None:
    store.save(strategy.model, strategy, Position(global_step=step), {"step": step}, metric)


def bases(store: CheckpointStore) -> dict[int, int | None]:
    return {info.step: info.base.step if info.base else None for info in store.list()}


def _save_deltas(folder: str) -> dict[Any, Any]:
    """A full checkpoint and two deltas for each sharding and optimizer; what this rank held at each."""
    saved = {}
    for sharding, optimizer in itertools.product(SHARDINGS, ("adam", "rowwise_adagrad")):
        store = CheckpointStore(f"{folder}/{sharding}-{optimizer}", Comm(), keep_last=9, deltas=True)
        strategy = build("ig", **sharding_options(sharding), optimizer=optimizer, **LARGE)
        for step in range(3):
            train(strategy, range(2 * step, 2 * step + 2))
            save(store, strategy, step)
            saved[sharding, optimizer, step] = held(strategy)
        store.wait()
        assert bases(store) == {0: None, 1: 0, 2: 0}
    return saved


def _load_deltas(folder: str) -> dict[Any, Any]:
    loaded = {}
    for number, (sharding, optimizer) in enumerate(itertools.product(SHARDINGS, ("adam", "rowwise_adagrad"))):
        store = CheckpointStore(f"{folder}/{sharding}-{optimizer}", Comm())
        other = sharding_options(SHARDINGS[(number // 2 + 1) % len(SHARDINGS)])
        strategy = build("ig", seed=9, **other, optimizer=optimizer, **LARGE)
        for info in store.list():
            store.load(info, strategy.model, strategy)
            loaded[sharding, optimizer, info.step] = held(strategy)
            train(strategy, range(1))
    return loaded


def _two_ranks(rank: int, size: int, folder: str) -> tuple[dict[Any, Any], dict[Any, Any]]:
    return _save_deltas(folder), _load_deltas(folder)


def test_deltas_of_two_ranks_restore_the_same_bits_anywhere(tmp_path: Path) -> None:
    ranks = run_ranks(_two_ranks, 2, str(tmp_path))
    with this_process():
        alone = _load_deltas(str(tmp_path))
    assert len(alone) == 3 * 2 * len(SHARDINGS)
    for key in alone:
        before = assembled([saved[key] for saved, _ in ranks])
        assert same(before, assembled([loaded[key] for _, loaded in ranks])), key
        assert same(before, assembled([alone[key]])), key


@pytest.fixture(autouse=True, scope="module")
def _alone() -> Iterator[None]:
    with this_process():
        yield


def test_a_delta_is_small_and_what_it_needs_is_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, None, keep_last=1, keep_best=0, deltas=True)
    strategy = build(**LARGE)
    for step in range(4):
        train(strategy, range(step, step + 1))
        save(store, strategy, step)
    store.wait()
    assert bases(store) == {0: None, 3: 0}
    full, delta = (sum(f.stat().st_size for f in folder.iterdir()) for folder in sorted(tmp_path.iterdir()))
    assert delta < full / 20
    save(store, strategy, 4, metric=0.5)  # the end of an epoch: full, and the old ones go
    store.wait()
    assert bases(store) == {4: None}


def test_mostly_changed_tables_are_saved_whole(tmp_path: Path) -> None:
    store, strategy = CheckpointStore(tmp_path, None, keep_last=9, deltas=True), build()  # 54 rows in all
    for step in range(3):
        train(strategy, range(step, step + 1))
        save(store, strategy, step)
    store.wait()
    assert bases(store) == {0: None, 1: None, 2: None}


def test_after_a_load_the_next_one_is_whole(tmp_path: Path) -> None:
    store, strategy = CheckpointStore(tmp_path, None, keep_last=9, deltas=True), build(**LARGE)
    for step in range(2):
        train(strategy, range(step, step + 1))
        save(store, strategy, step)
    newest = store.latest() if store.wait() is None else None
    assert newest is not None
    again = build(seed=5, **LARGE)
    store.load(newest, again.model, again)
    assert same(held(again), held(strategy))
    for step in (2, 3):
        train(again, range(step, step + 1))
        save(store, again, step)
    store.wait()
    assert bases(store) == {0: None, 1: 0, 2: None, 3: 2}


def test_a_base_that_was_removed_is_replaced(tmp_path: Path) -> None:
    store, strategy = CheckpointStore(tmp_path, None, keep_last=9, deltas=True), build(**LARGE)
    save(store, strategy, 0)
    store.wait()
    shutil.rmtree(tmp_path / "step-000000000")
    save(store, strategy, 1)
    save(store, strategy, 2)
    store.wait()
    assert bases(store) == {1: None, 2: 1}


def test_rows_are_read_through_the_reader(tmp_path: Path) -> None:
    store, strategy = CheckpointStore(tmp_path, None, deltas=True), build(**LARGE)
    save(store, strategy, 0)
    train(strategy, range(3))
    save(store, strategy, 1)
    store.wait()
    info = read_checkpoint(tmp_path / "step-000000001")
    rows = strategy.model.rows.local_rows.numpy()
    assert (info.read_rows("user", slice(None)) == rows[:4000]).all()
    for part in (slice(5, 17), slice(0, 1), slice(20, 4000), slice(30, 30)):
        assert (info.read_rows("item", part) == rows[4000:][part]).all()
    info.verify()
    assert info.checksums() != read_checkpoint(tmp_path / "step-000000000").checksums()


def _dies_between_parts(folder: str, files: int) -> None:
    """A full checkpoint of step 1, a delta of step 2, then death after `files` files of the delta of step 3."""
    from invdist.training.checkpoint import writer

    writer._SMALL_BYTES = 0  # every tensor has a file of its own
    with this_process():
        strategy = build(**LARGE)
        store = CheckpointStore(folder, None, deltas=True)
        written, write = [], writer._write

        def dying(*args: Any) -> Any:
            if store.steps() == [1, 2]:
                written.append(1)
                if len(written) > files:
                    os.kill(os.getpid(), signal.SIGKILL)
            return write(*args)

        writer._write = dying
        for step in (1, 2, 3):
            train(strategy, range(step, step + 1))
            save(store, strategy, step)
            store.wait()


@pytest.mark.parametrize("files", [2])
def test_killed_between_the_parts_of_a_delta(tmp_path: Path, files: int) -> None:
    module = "tests.training.test_delta_checkpoint"
    code = f"from {module} import _dies_between_parts; _dies_between_parts({str(tmp_path)!r}, {files})"
    process = subprocess.run([sys.executable, "-c", code], timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "step-000000003.partial").glob("*.safetensors"))) == files
    expected = build(**LARGE)
    train(expected, range(1, 3))
    store, strategy = CheckpointStore(tmp_path, None, deltas=True), build(seed=1, **LARGE)
    newest = store.latest()
    assert newest is not None
    assert store.load(newest, strategy.model, strategy)[0].global_step == 2
    assert same(held(strategy), held(expected))
    save(store, strategy, 3)
    store.wait()
    assert sorted(os.listdir(tmp_path)) == ["step-000000001", "step-000000002", "step-000000003"]


# What may be wrong with one


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    store, strategy = CheckpointStore(folder, None, deltas=True), build(**LARGE)
    save(store, strategy, 1)
    train(strategy, range(2))
    save(store, strategy, 2)
    store.wait()
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy to spoil: the delta."""
    return Path(shutil.copytree(good, tmp_path / "copy")) / "step-000000002"


def read_all(folder: Path) -> None:
    info = read_checkpoint(folder)
    for name in info.manifest.tensors:
        info.read(name)


def test_any_value_of_a_delta_manifest_may_be_anything(good: Path) -> None:
    manifest = manifest_of(good / "step-000000002")
    every, spoiled = list(places(manifest)), good / "step-000000003"
    shutil.copytree(good / "step-000000002", spoiled)

    @given(path=st.sampled_from(every), value=JSON)
    @FUZZ
    def check(path: tuple[Any, ...], value: Any) -> None:
        put(spoiled, replaced(manifest, path, value))
        with contextlib.suppress(UserError):
            read_all(spoiled)

    check()
    shutil.rmtree(spoiled)


@pytest.mark.parametrize("way", ["gone", "link", "other", "delta", "damaged"])
def test_a_base_that_is_not_the_one_it_was(folder: Path, way: str) -> None:
    base = folder.with_name("step-000000001")
    if way in ("gone", "link"):
        base.rename(folder.with_name("elsewhere"))
    if way == "link":
        base.symlink_to(folder.with_name("elsewhere"))
    if way == "other":
        put(base, manifest_of(base))  # the same, written in another way
    if way == "delta":
        digest = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
        folder = Path(shutil.copytree(folder, folder.with_name("step-000000003")))
        put(folder, manifest_of(folder) | {"base": {"name": "step-000000002", "sha256": digest}})
    if way == "damaged":
        os.truncate(next(base.glob("*.safetensors")), 100)
    with pytest.raises(DamagedCheckpoint, match=r"step-00000000[12]"):
        read_all(folder)


@pytest.mark.parametrize("rows", [[0, 0], [3, 1], [-1, 2], [1, 4000], [2**40, 2**41]])
def test_rows_out_of_order_or_out_of_the_table(folder: Path, rows: list[int]) -> None:
    manifest, path = manifest_of(folder), folder / "rank-0.safetensors"
    tensors = safetensors.torch.load(path.read_bytes())
    entry = next(e for e in manifest["tensors"]["rows/user/weight"]["changed"])
    tensors[entry["index"]] = torch.tensor(rows)
    tensors[entry["key"]] = torch.zeros(2, 8)
    entry["rows"] = 2
    content = safetensors.torch.save(tensors)
    path.write_bytes(content)
    manifest["files"][path.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    put(folder, manifest)
    with pytest.raises(DamagedCheckpoint, match="changed rows of rows/user/weight are not ascending rows"):
        read_all(folder)


def test_a_delta_without_base_or_with_parts_too(folder: Path) -> None:
    manifest = manifest_of(folder)
    put(folder, {**manifest, "base": None})
    with pytest.raises(DamagedCheckpoint, match="changed rows, but no base"):
        read_all(folder)
    entry = manifest["tensors"]["rows/user/weight"]
    entry["changed"][0]["columns"] = 9
    put(folder, manifest)
    with pytest.raises(DamagedCheckpoint, match="changed rows do not fit shape"):
        read_all(folder)
    entry["changed"][0] |= {"columns": 8, "rows": 3999}
    put(folder, manifest)
    with pytest.raises(DamagedCheckpoint, match="3999 x 8 values do not fit"):
        read_all(folder)


def test_a_damaged_base_makes_a_run_fall_back(tmp_path: Path, good: Path) -> None:
    copy = Path(shutil.copytree(good, tmp_path / "copy"))
    file = copy / "step-000000001" / "rank-0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    store, strategy = CheckpointStore(copy, None), build(**LARGE)
    newest = store.latest()
    assert newest is not None
    with pytest.raises(DamagedCheckpoint, match=r"step-000000001/rank-0\.safetensors is damaged"):
        store.load(newest, strategy.model, strategy)


def test_old_versions_refuse_a_delta(good: Path) -> None:
    assert json.loads((good / "step-000000002/manifest.json").read_text())["version"] == 2
    assert json.loads((good / "step-000000001/manifest.json").read_text())["version"] == 1


@pytest.mark.parametrize("shape", [(1000, 7), (3,), (), (0, 4), (5, 1, 9), (2, 500)])
def test_staging_copies_through_small_buffers(shape: tuple[int, ...]) -> None:
    source = torch.randn(shape)
    target = torch.empty_like(source)
    Staging(1024, pin=False).copy(target, source)
    assert torch.equal(target, source)
