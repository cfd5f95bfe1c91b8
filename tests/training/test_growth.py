"""Models that grow: what belongs to an id follows the id, against a dictionary of ids that is kept by hand."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from invdist import train
from invdist.config import Config
from invdist.config import from_mapping as config_of
from invdist.data.dataset import Dataset
from invdist.embeddings.comm import Comm
from invdist.learning.strategy import Strategy
from invdist.runtime.errors import UserError
from invdist.runtime.process import single_rank
from invdist.serving.run import open_run
from invdist.training import run_folder
from invdist.training.checkpoint import CheckpointStore, Position
from invdist.training.compare import same_weights
from invdist.training.growth import ById, joined, settings_from
from invdist.training.history import History
from invdist.training.trainer import Trainer
from tests.distributed import run_ranks
from tests.embeddings.sharded import SHARDINGS, sharding_options
from tests.growing import QUICK, VECTORS, a_day, grow_here
from tests.runs import train_here
from tests.training.checkpointing import assembled, build, held

OPTIMIZERS = ("adam", "rowwise_adagrad")
Ids = dict[str, list[int]]
Day = dict[str, Any]


def _marked(strategy: Strategy, ids: Ids) -> None:
    """Every value of a row, and of its state, tells the id and the column it is for; memory slots tell items."""
    rows = strategy.model.rows
    for number, local in enumerate((rows.local_rows, *rows.optimizer.state.values())):
        for shard in rows.layout.on(rows.comm.rank):
            mine = torch.tensor(ids[shard.table][shard.row : shard.row + shard.rows], dtype=torch.float32)
            values = local[shard.base : shard.base + shard.rows]
            mark = mine + 1000 * number
            column = torch.arange(shard.column, shard.column + shard.columns) / 64
            values.copy_(mark if values.dim() == 1 else mark[:, None] + column)
    for name, (first, values) in strategy.sharded_state().items():
        mine = torch.tensor(ids["user"][first : first + len(values)])
        if name == "item":
            values.copy_((mine[:, None] * 7 + torch.arange(values.shape[1])) % len(ids["item"]))
        else:
            values.copy_(mine[:, None, None].expand_as(values))


def _live(rank: int, size: int, folder: str, days: list[Day]) -> dict[tuple[str, int, int], np.ndarray]:
    """Marks a model on the first day and grows it through the others; what this rank holds at the end."""
    strategy, ids = None, None
    for number, day in enumerate(days):
        store = CheckpointStore(f"{folder}/{number}", Comm(), asynchronous=False)
        before, ids = ids, {"user": day["user"], "item": day["item"]}
        strategy = build(
            "srns",
            seed=number,
            **sharding_options(day["sharding"]),
            optimizer=day["optimizer"],
            users=len(ids["user"]),
            items=len(ids["item"]),
        )
        if before is None:
            _marked(strategy, ids)
        else:
            source = {table: joined(pa.array(before[table]), pa.array(ids[table])) for table in ids}
            info = CheckpointStore(f"{folder}/{number - 1}", Comm()).latest()
            assert info is not None
            store.load(info, strategy.model, strategy, by_id=ById(info, source, strategy.model))
        store.save(strategy.model, strategy, Position(global_step=number), {})
    assert strategy is not None
    return held(strategy)


def _histories(rank: int, size: int, folder: str, histories: list[list[Day]]) -> list[Any]:
    return [_live(rank, size, f"{folder}/{n}", days) for n, days in enumerate(histories)]


@st.composite
def _history(draw: st.DrawFn) -> list[Day]:
    """Days with ids added, dropped and in any order, each with a sharding; one optimizer throughout."""
    optimizer = draw(st.sampled_from(OPTIMIZERS))
    ids = st.lists(st.integers(1, 40), min_size=9, max_size=14, unique=True)
    return [
        {"user": draw(ids), "item": draw(ids), "sharding": draw(st.sampled_from(SHARDINGS)), "optimizer": optimizer}
        for _ in range(draw(st.integers(2, 4)))
    ]


def _check(days: list[Day], whole: dict[str, np.ndarray]) -> None:
    """Everything that a last model holds of an id is of that id, or the prior of its table if the id came later."""
    marks = {"weight": 0, "m": 1, "v": 2, "sum": 1}
    for table in ("user", "item"):
        stayed = dict.fromkeys(days[0][table], True)
        for day in days[1:]:
            stayed = {one: stayed.get(one, False) for one in day[table]}
        for name, values in whole.items():
            entity, _, kind = name.partition(".")
            if entity != table or kind not in marks:
                continue
            columns = np.arange(values.shape[1]) / 64 if values.ndim == 2 else 0.0
            for one, value in zip(days[-1][table], values, strict=True):
                mark = one + 1000 * marks[kind] + columns
                if stayed[one]:
                    np.testing.assert_array_equal(value, np.float32(mark), err_msg=f"{name} of {one}")
                elif kind != "weight":
                    assert not value.any(), f"{name} of the new id {one}"
    # The memory of a user has the items that it had, under their present numbers, and none that is gone.
    first, last = days[0], days[-1]
    survivors = set(first["item"]).intersection(*(day["item"] for day in days[1:]))
    users = set(first["user"]).intersection(*(day["user"] for day in days[1:]))
    for user, slots, past in zip(last["user"], whole["sharded.item"], whole["sharded.past"], strict=True):
        found = {last["item"][slot] for slot in slots if slot >= 0}
        had = {first["item"][(user * 7 + n) % len(first["item"])] for n in range(len(slots))}
        assert found == (had & survivors if user in users else set())
        assert (np.isnan(past).all(1) == (slots < 0)).all()


@settings(max_examples=5, deadline=None)
@given(days=_history())
def test_no_id_ends_in_the_row_of_another(days: list[Day]) -> None:
    with single_rank(), tempfile.TemporaryDirectory() as folder:
        _check(days, assembled([_live(0, 1, folder, days)]))


def _shuffled(days: list[Day], seed: int) -> list[Day]:
    rng = np.random.default_rng(seed)
    return [{**day, **{table: rng.permutation(day[table]).tolist() for table in ("user", "item")}} for day in days]


def _random_days(seed: int) -> list[Day]:
    rng = np.random.default_rng(seed)
    drawn = [{table: rng.permutation(30)[:12].tolist() for table in ("user", "item")} for _ in range(3)]
    return [
        {**ids, "sharding": SHARDINGS[(seed + n) % len(SHARDINGS)], "optimizer": "adam"} for n, ids in enumerate(drawn)
    ]


@pytest.mark.slow
def test_ranks_and_the_order_of_ids_change_nothing(tmp_path: Path) -> None:
    """Three ranks, ids in another order: every id has the same bits, the priors of new ids too."""
    histories = [_random_days(seed) for seed in range(4)]
    shuffled = [_shuffled(days, seed) for seed, days in enumerate(histories)]
    with single_rank():
        alone = [assembled([_live(0, 1, f"{tmp_path}/{n}", days)]) for n, days in enumerate(histories)]
    ranks = run_ranks(_histories, 3, f"{tmp_path}/ranks", shuffled)
    for number, (days, others, here) in enumerate(zip(histories, shuffled, alone, strict=True)):
        there = assembled([found[number] for found in ranks])
        _check(others, there)
        for name, values in here.items():
            table = name.partition(".")[0]
            if table in ("user", "item"):
                order = [others[-1][table].index(one) for one in days[-1][table]]
                assert there[name][order].tobytes() == values.tobytes(), name


def test_new_rows_are_the_mean_of_the_older_ones(tmp_path: Path) -> None:
    with single_rank():
        older, newer = build(users=500, items=8), build(seed=1, users=502, items=8)
        store = CheckpointStore(tmp_path, Comm(), asynchronous=False)
        store.save(older.model, older, Position(), {})
        info = store.latest()
        assert info is not None
        source = {"user": np.array([*range(500), -1, -1]), "item": np.arange(8)}
        store.load(info, newer.model, newer, by_id=ById(info, source, newer.model))
    mean = older.model.rows.local_rows[:500].numpy().astype(np.float64).mean(0)
    for row in (500, 501):
        np.testing.assert_allclose(newer.model.rows.local_rows[row].numpy(), mean, rtol=0, atol=1e-9)


def _resumed(run: Path, *overrides: str) -> Path:
    config, folder = run_folder.reopen(run, list(overrides))
    with single_rank():
        Trainer(config, folder, device=torch.device("cpu")).fit()
    return Path(str(folder))


@pytest.mark.parametrize("more", [(), VECTORS], ids=["ig", "ig with vectors"])
def test_growing_by_nobody_is_a_resume(tiny_data: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    parent = train_here(tiny_data, tmp_path / "monday", "training.epochs=2", "optimizer.gamma=0.01", *more)
    assert (History.read(parent).final or {})["best_epoch"] == 1
    grown = grow_here(parent, tmp_path / "tuesday", "growth.epochs=1")
    resumed = _resumed(shutil.copytree(parent, tmp_path / "resumed"), "training.epochs=3")
    assert same_weights(grown, resumed)
    assert not same_weights(grown, parent)


def test_a_grown_run_knows_the_new_and_is_used_like_any_other(tmp_path: Path) -> None:
    monday = a_day(tmp_path, "monday", range(100))
    tuesday = a_day(tmp_path, "tuesday", range(50, 130), "monday", 1, keep=1)
    wednesday = a_day(tmp_path, "wednesday", range(60, 140), "tuesday", 2, drop_unseen=2)
    parent = train_here(monday, tmp_path / "runs/monday", *QUICK, "training.epochs=5", *VECTORS)
    child = grow_here(parent, tmp_path / "runs/tuesday", f"data.path={tuesday}")
    grandchild = grow_here(child, tmp_path / "runs/wednesday", f"data.path={wednesday}")
    found = [event for event in History.read(child).events if event["event"] == "grown"]
    assert [(e["known_users"], e["new_users"], e["dropped_users"]) for e in found] == [(100, 30, 0)]
    found = [event for event in History.read(grandchild).events if event["event"] == "grown"]
    assert [(e["known_users"], e["new_users"], e["dropped_users"]) for e in found] == [(80, 10, 50)]
    epochs = [len(History.read(run).epochs) for run in (parent, child, grandchild)]
    assert epochs[1:] == [1, 1]
    assert [e["epoch"] for e in History.read(child).epochs] == [(History.read(parent).final or {})["best_epoch"] + 1]
    opened = open_run(grandchild)
    assert len(opened.users) == 90
    # It has learned: even users like even items, those of the last day too.
    score = opened.model(torch.arange(90), torch.zeros(90, dtype=torch.int64)).numpy()
    even = np.array(opened.users.raw.to_pylist()) % 2 == opened.items.raw[0].as_py() % 2
    assert score[even].mean() > score[~even].mean() + 1


class _Killed(Exception):
    """What ends a run in the middle."""


def test_a_grown_run_that_is_killed_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates fall and rows are held near where they started: a resumed run knows both again."""
    monday = a_day(tmp_path, "monday", range(60))
    tuesday = a_day(tmp_path, "tuesday", range(20, 80), "monday", 1, keep=0, older="unclear")
    saves = ("checkpoint.every_steps=4", "checkpoint.asynchronous=false", "growth.epochs=2")
    parent = train_here(monday, tmp_path / "runs/monday", *QUICK, "training.epochs=2", *VECTORS)
    whole = grow_here(parent, tmp_path / "whole/tuesday", f"data.path={tuesday}", *saves)
    assert (tmp_path / "whole/exposure-vectors").exists()  # in the folder of runs that was asked for
    # Of falling rates the last epoch is used, though validation may prefer another.
    assert (History.read(whole).final or {})["best_epoch"] == History.read(whole).epochs[-1]["epoch"]
    paces, step = [], Trainer._step

    def until(trainer: Trainer, *args: Any) -> Any:
        if len(paces) == 14:
            raise _Killed
        done = step(trainer, *args)
        assert trainer.model.anchor is not None
        paces.append(trainer.model.pace)
        return done

    monkeypatch.setattr(Trainer, "_step", until)
    with pytest.raises(_Killed):
        grow_here(parent, tmp_path / "killed/tuesday", f"data.path={tuesday}", *saves)
    monkeypatch.setattr(Trainer, "_step", step)
    assert paces == sorted(paces, reverse=True)
    assert paces[0] == 2
    with pytest.raises(UserError, match=r"growth\.epochs=2, and its rates fall"):
        _resumed(tmp_path / "killed/tuesday", "growth.epochs=3")
    assert same_weights(_resumed(tmp_path / "killed/tuesday"), whole)


def _two_days(rank: int, size: int, folder: str, monday: str, tuesday: str, placements: tuple[str, str]) -> None:
    """A run on each of two days, the second grown from the first, with the placement of each."""
    settings = [*QUICK, "training.epochs=2", *VECTORS, "training.test=false", "data.readers=0"]
    given = [f"data.path={monday}", f"runs={folder}", "name=monday", f"rows.placement={placements[0]}"]
    first = config_of({}, [*settings, *given])
    Trainer(first, _folder(first, rank), device=torch.device("cpu")).fit()
    then = [f"data.path={tuesday}", "name=tuesday", f"rows.placement={placements[1]}"]
    second = settings_from(f"{folder}/monday", then)
    Trainer(second, _folder(second, rank), device=torch.device("cpu")).fit()


def _folder(config: Config, rank: int) -> Path:
    """The folder of a run, which the first rank makes."""
    if rank == 0:
        run_folder.create(config, Dataset.open(config.data.path))
    torch.distributed.barrier()
    return Path(config.runs) / str(config.name)


@pytest.mark.slow
def test_hashed_placement_grows_to_the_same_rows(tmp_path: Path) -> None:
    monday = a_day(tmp_path, "monday", range(60))
    tuesday = a_day(tmp_path, "tuesday", range(20, 80), "monday", 1, keep=0, older="unclear")
    found = {}
    for placements in (("in_order", "in_order"), ("in_order", "hashed"), ("hashed", "hashed"), ("hashed", "in_order")):
        folder = tmp_path / "-".join(placements)
        run_ranks(_two_days, 2, str(folder), str(monday), str(tuesday), placements)
        run = open_run(folder / "tuesday")
        found[placements] = [run.model.user, run.model.item]
    expected = found.pop(("in_order", "in_order"))
    for placements, tables in found.items():
        for table, wanted in zip(tables, expected, strict=True):
            # Sums over rows are in another order: equal up to rounding, which Adam makes larger.
            torch.testing.assert_close(table, wanted, rtol=0, atol=2e-3, msg=str(placements))


def test_what_does_not_fit_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monday = a_day(tmp_path, "monday", range(60))
    parent = train_here(monday, tmp_path / "runs/monday", *QUICK, "training.epochs=1")
    other = a_day(tmp_path, "other", range(40, 80), seed=3)
    stranger = grow_here(parent, tmp_path / "runs/other", f"data.path={other}")
    warnings = [event["message"] for event in History.read(stranger).events if event["event"] == "warning"]
    assert any("does not descend" in message for message in warnings)
    with pytest.raises(UserError, match=r"rows\.dim=8"):
        grow_here(parent, tmp_path / "runs/wide", f"data.path={other}", "rows.dim=16")
    for run in (["--from", str(parent)], ["--resume", str(stranger)]):
        assert train.main([*run, f"data.path={other}", "training.epochs=20"]) == 2
        assert "takes growth.epochs=N" in capsys.readouterr().err
    shutil.move(monday, tmp_path / "moved")
    with pytest.raises(UserError, match="if it has moved"):
        grow_here(parent, tmp_path / "runs/moved", f"data.path={other}")
