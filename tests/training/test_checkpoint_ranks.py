"""What is saved at one number of ranks and one sharding is loaded at any other, to the bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from invdist.embeddings.comm import Comm
from invdist.training.checkpoint import CheckpointStore, Position
from tests.distributed import run_ranks
from tests.embeddings.sharded import SHARDINGS, sharding_options
from tests.training.checkpointing import assembled, build, held, same, this_process, train

OPTIMIZERS = ("adam", "rowwise_adagrad")
RESUMED = (("none", "gmf"), ("none", "neumf"), ("ig", "gmf"), ("ig", "neumf"), ("srns", "gmf"))


def _save_all(folder: str) -> dict[Any, Any]:
    """A checkpoint with each optimizer, one for each sharding; what this rank held then."""
    saved = {}
    for optimizer in OPTIMIZERS:
        store = CheckpointStore(f"{folder}/{optimizer}", Comm(), keep_last=len(SHARDINGS))
        for number, sharding in enumerate(SHARDINGS):
            strategy = build("srns", seed=number, **sharding_options(sharding), optimizer=optimizer)
            train(strategy, range(3))
            saved[optimizer, sharding] = held(strategy)
            store.save(strategy.model, strategy, Position(2, 0, 1, 3, number), {"of": sharding}, 0.5)
            train(strategy, range(3, 5))  # while it is written: no business of the checkpoint
        store.wait()
    return saved


def _load_all(folder: str) -> dict[Any, Any]:
    """Every checkpoint into every sharding; what this rank holds after."""
    loaded = {}
    for optimizer in OPTIMIZERS:
        store = CheckpointStore(f"{folder}/{optimizer}", Comm())
        for sharding in SHARDINGS:
            strategy = build("srns", seed=9, **sharding_options(sharding), optimizer=optimizer)
            for number, (source, info) in enumerate(zip(SHARDINGS, store.list(), strict=True)):
                position, extra = store.load(info, strategy.model, strategy)
                assert (position, extra) == (Position(2, 0, 1, 3, number), {"of": source})
                loaded[optimizer, source, sharding] = held(strategy)
                train(strategy, range(1))  # so that the next load has something to undo
    return loaded


def _resume_all(folder: str) -> list[str]:
    """Which runs differ, on this rank, between going on and starting again from a checkpoint."""
    wrong = []
    store = CheckpointStore(f"{folder}/resumed", Comm())
    for number, (method, model) in enumerate(RESUMED):
        strategy = build(method, model=model, dropout=0.3)
        train(strategy, range(4))
        store.save(strategy.model, strategy, Position(global_step=number), {})
        train(strategy, range(4, 10))
        again = build(method, seed=5, model=model, dropout=0.3)
        store.wait()
        info = store.latest()
        assert info is not None
        store.load(info, again.model, again)
        train(again, range(4, 10))
        if not same(held(strategy), held(again)):
            wrong.append(f"{method} {model}")
    return wrong


def _two_ranks(rank: int, size: int, folder: str) -> tuple[dict, dict, list[str]]:
    return _save_all(folder), _load_all(folder), _resume_all(folder)


def _three_ranks(rank: int, size: int, folder: str) -> dict[Any, Any]:
    return _load_all(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> list[tuple[dict, dict, list[str]]]:
    return run_ranks(_two_ranks, 2, str(folder))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_saved_by_two_ranks_loaded_by_others(folder: Path, two_ranks: list, size: int) -> None:
    saved = [rank[0] for rank in two_ranks]
    if size == 1:
        with this_process():
            loaded = [_load_all(str(folder))]
    else:
        loaded = [rank[1] for rank in two_ranks] if size == 2 else run_ranks(_three_ranks, 3, str(folder))
    for optimizer, source, sharding in itertools.product(OPTIMIZERS, SHARDINGS, SHARDINGS):
        before = assembled([rank[optimizer, source] for rank in saved])
        after = assembled([rank[optimizer, source, sharding] for rank in loaded])
        assert same(before, after), (optimizer, source, sharding)


def test_resumed_run_equals_uninterrupted(two_ranks: list, tmp_path: Path) -> None:
    assert [rank[2] for rank in two_ranks] == [[], []]
    with this_process():
        assert _resume_all(str(tmp_path)) == []
