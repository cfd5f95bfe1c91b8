"""A save that is killed, or finds the disk full, costs that checkpoint and no other."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from invdist.runtime.errors import UserError
from invdist.training.checkpoint import CheckpointStore, Position
from tests.distributed import run_ranks
from tests.training.checkpointing import build, held, same, this_process, train

BIG: dict[str, Any] = {"users": 300_000, "dim": 32}


def _saves_forever(folder: str) -> None:
    """A good checkpoint of step 1, then large ones without end."""
    with this_process():
        strategy = build(**BIG)
        store = CheckpointStore(folder, None)
        step = 1
        while True:
            store.save(strategy.model, strategy, Position(global_step=step), {})
            step += 1


def test_killed_while_writing(tmp_path: Path) -> None:
    code = f"from tests.training.test_checkpoint_faults import _saves_forever; _saves_forever({str(tmp_path)!r})"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        partial, deadline = None, time.monotonic() + 60
        while partial is None and time.monotonic() < deadline:
            time.sleep(0.001)
            late = sorted(tmp_path.glob("step-00000000[3-9].partial/*.safetensors"))
            partial = late[0].parent if late else None
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert partial is not None
    assert partial.exists()
    store = CheckpointStore(tmp_path, None)
    step = int(partial.name[5:14])
    assert [info.step for info in store.list()] == [step - 2, step - 1]
    with this_process():
        strategy = build(seed=1, **BIG)
        latest = store.latest()
        assert latest is not None
        assert store.load(latest, strategy.model, strategy)[0].global_step == step - 1
        store.save(strategy.model, strategy, Position(global_step=step + 5), {})
        store.wait()
    assert not partial.exists()
    assert sorted(os.listdir(tmp_path)) == [f"step-{step - 1:09d}", f"step-{step + 5:09d}"]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting a small disk is not allowed here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


def _fill_up(folder: Path, step: int) -> None:
    """Saves something small, then something that does not fit."""
    with this_process():
        store = CheckpointStore(folder, None)
        strategy = build()
        train(strategy, range(2))
        before = held(strategy)
        store.save(strategy.model, strategy, Position(global_step=step), {})
        big = build(users=20_000, dim=32)
        store.save(big.model, big, Position(global_step=step + 1), {})
        with pytest.raises(UserError, match=rf"step {step + 1} was not saved .*no room.*step-{step:09d} is still good"):
            store.wait()
        store.wait()  # said once
        assert os.listdir(folder) == [f"step-{step:09d}"]
        train(strategy, range(2, 4))
        latest = store.latest()
        assert latest is not None
        store.load(latest, strategy.model, strategy)
        assert same(held(strategy), before)
        store.save(strategy.model, strategy, Position(global_step=step + 2), {})  # there is room again
        store.wait()


def test_full_disk(tiny_disk: Path) -> None:
    _fill_up(tiny_disk, 7)


def test_file_size_limit(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        _fill_up(tmp_path / "checkpoints", 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _one_rank_cannot_write(rank: int, size: int, folder: str) -> list[str]:
    """What each rank is told when only the second finds no room, then when it sees another folder."""
    strategy, told = build(), []
    store = CheckpointStore(folder, strategy.model.comm)
    store.save(strategy.model, strategy, Position(global_step=1), {})
    store.wait()
    if rank == 1:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    for step in (2, 3):
        if step == 3:
            if rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            store = CheckpointStore(folder + "-other" * rank, strategy.model.comm)
        try:
            store.save(strategy.model, strategy, Position(global_step=step), {})
            store.wait()
        except UserError as error:
            told.append(str(error))
    info = CheckpointStore(folder, strategy.model.comm).latest()
    assert info is not None
    told.append(str(info.step))
    return told


def test_failure_of_one_rank_is_told_by_all(tmp_path: Path) -> None:
    for full, apart, last in run_ranks(_one_rank_cannot_write, 2, str(tmp_path / "run")):
        assert "step 2 was not saved" in full
        assert "rank 1: no room" in full
        assert "step-000000001 is still good" in full
        assert "must be on a filesystem that all ranks share" in apart
        assert last == "1"
