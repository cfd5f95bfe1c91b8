"""Hashed placement: popular ids on different ranks, the same training, and checkpoints that load either way."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from invdist.bench.placement import busiest
from invdist.cli import bench
from invdist.embeddings.comm import Comm
from invdist.embeddings.placement import spread_multiplier
from invdist.training.checkpoint import CheckpointStore, DamagedCheckpoint, Position, read_checkpoint
from tests.distributed import run_ranks
from tests.training.checkpointing import build, this_process, train

SPEC: dict[str, Any] = {"sharding": "row_wise", "users": 400, "items": 301}  # steps touch the first few of them
KINDS = ("weight", "m", "v")


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 10, 64, 97, 1000, 131_690, 10**9])
def test_every_row_has_a_place_of_its_own(rows: int) -> None:
    multiplier = spread_multiplier(rows)
    assert 1 <= multiplier <= max(1, rows)
    assert math.gcd(multiplier, rows) == 1
    if rows <= 131_690:
        assert len(np.unique(np.arange(rows, dtype=np.int64) * multiplier % rows)) == rows


def test_popular_ids_are_spread(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["placement", "--json", "--items", "20000", "--batch", "16384"]) == 0
    found = json.loads(capsys.readouterr().out)
    # The most popular id is asked for by every rank: with 64 of them, that alone is a fourth of what one is asked for.
    for ranks, bound in ((8, 1.1), (64, 1.5)):
        assert found[f"in_order_{ranks}_ranks"] > 2 * bound
        assert found[f"hashed_{ranks}_ranks"] < bound
    assert busiest(np.arange(64), 64, 8, 1) == 1  # every rank asks for 8 ids, all of one owner, 8 owners in all


def _tables(folder: str, step: int) -> dict[str, np.ndarray]:
    """All rows by id, as anybody reads them."""
    info = read_checkpoint(f"{folder}/step-{step:09d}")
    return {
        f"{table} {kind}": info.read(f"rows/{table}/{kind}").numpy() for table in ("user", "item") for kind in KINDS
    }


def _trains(rank: int, size: int, folder: str) -> None:
    """The same steps with both placements, saved whole and as a delta; then each continued from the other."""
    for placement in ("in_order", "hashed"):
        store = CheckpointStore(f"{folder}/{placement}", Comm(), keep_last=9, deltas=True)
        strategy = build("ig", placement=placement, **SPEC)
        assert bool(strategy.model.rows.layout.multipliers) == (placement == "hashed")
        store.save(strategy.model, strategy, Position(global_step=0), {})
        train(strategy, range(1))
        store.save(strategy.model, strategy, Position(global_step=1), {})
        train(strategy, range(1, 4))
        store.save(strategy.model, strategy, Position(global_step=4), {}, 0.5)
        store.wait()
        assert [info.base is not None for info in store.list()] == [False, True, False]
    for source, target in (("in_order", "hashed"), ("hashed", "in_order"), ("hashed", "hashed")):
        for step in (1, 4):
            store = CheckpointStore(f"{folder}/{source}", Comm())
            strategy = build("ig", seed=7, placement=target, **SPEC)
            info = next(info for info in store.list() if info.step == step)
            store.load(info, strategy.model, strategy)
            train(strategy, range(4, 6))
            other = CheckpointStore(f"{folder}/{source}-{target}-{step}", Comm())
            other.save(strategy.model, strategy, Position(global_step=6), {})
            other.wait()


def test_training_and_checkpoints_do_not_depend_on_placement(tmp_path: Path) -> None:
    run_ranks(_trains, 3, str(tmp_path))
    for step in (0, 1, 4):
        in_order, hashed = (_tables(f"{tmp_path}/{placement}", step) for placement in ("in_order", "hashed"))
        for name, values in in_order.items():
            assert values.tobytes() == hashed[name].tobytes(), (step, name)
    for step in (1, 4):
        ends = [
            _tables(f"{tmp_path}/{pair}-{step}", 6) for pair in ("in_order-hashed", "hashed-in_order", "hashed-hashed")
        ]
        for name, values in ends[0].items():
            assert all(values.tobytes() == other[name].tobytes() for other in ends[1:]), (step, name)
    info = read_checkpoint(tmp_path / "hashed/step-000000004")
    assert (info.read_rows("item", slice(5, 17)) == _tables(f"{tmp_path}/in_order", 4)["item weight"][5:17]).all()
    with this_process():  # one rank has nothing to spread
        strategy = build("ig", seed=3, placement="hashed", **SPEC)
        CheckpointStore(tmp_path / "hashed", None).load(info, strategy.model, strategy)
        whole = torch.cat([torch.from_numpy(_tables(f"{tmp_path}/hashed", 4)[f"{t} weight"]) for t in ("user", "item")])
        assert torch.equal(strategy.model.rows.local_rows, whole)

    manifest = tmp_path / "hashed/step-000000004/manifest.json"
    content = json.loads(manifest.read_text())
    assert content["version"] == 2  # older versions must not read rows in another order
    content["tensors"]["rows/user/weight"]["multiplier"] = 2
    manifest.write_text(json.dumps(content))
    with pytest.raises(DamagedCheckpoint, match="cannot be spread by 2"):
        read_checkpoint(manifest.parent)
